from pathlib import Path
def draw(pipe, path, expand=None): return []
