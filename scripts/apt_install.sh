#!/bin/sh
# apt_install.sh PACKAGE: install a Debian package if that is possible without asking anybody.
# Quiet. Exit status 0 if the package was installed, 1 if not (no apt-get, no rights, no such package).
set -u

if [ "$(id -u)" -eq 0 ]; then
    as_root="env"
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n env"
else
    exit 1
fi

install_package() {
    $as_root DEBIAN_FRONTEND=noninteractive \
        apt-get install --yes --quiet --no-install-recommends "$1" </dev/null >/dev/null 2>&1
}

refresh_package_lists() {
    $as_root apt-get update --quiet </dev/null >/dev/null 2>&1
}

command -v apt-get >/dev/null || exit 1
install_package "$1" || { refresh_package_lists && install_package "$1"; } || exit 1
