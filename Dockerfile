# An image in which `make demo` runs: docker build -t fxpipe . && docker run --rm fxpipe
# and the tests: docker run --rm fxpipe make test-fast
# The project's own checks have no container engine. Its lines were run, `make demo` as the last one, in a root
# directory of Debian 12 (`debootstrap --variant=minbase bookworm`, `chroot`), which has Python 3.11.2. Behind a mirror:
# docker build --build-arg PIP_INDEX_URL=… -t fxpipe .
FROM debian:12-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ git graphviz make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_INDEX_URL
WORKDIR /fxpipe
COPY . .
RUN make env

CMD ["make", "demo"]
