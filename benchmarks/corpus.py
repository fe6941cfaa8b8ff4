"""Makes a text of 200 million bytes that do not repeat, to train on: sources of Python packages.

    python benchmarks/corpus.py --out .corpus [FOLDER ...]
    cat .corpus/text.xz .corpus/heldout.xz | xz -d > build/corpus     # for --data.path

The text is every .py, .md, .rst and .txt file of the packages below, which pip downloads, of this
Python's library, of the packages installed in it, and of the folders given. A file is left out
unless most of it stands on lines that no file before it has: copies, other versions of a file and
generated variants go. Files are shuffled, and a package has at most 16 MB. Those held out are as
long as the trainer holds out, so that it cuts the two together where they meet. sources.txt says
how much came from each package.
"""

import argparse
import collections
import hashlib
import lzma
import math
import os
import pathlib
import random
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Sequence

from normfuse.train.data import HELD_OUT

PACKAGES = (
    "ansible==14.5.0 astropy==8.0.2 biopython==1.88 django==6.1.3 mypy==2.4.1 pandas==3.1.1 "
    "scikit-learn==1.9.1 sqlalchemy==2.1.9 transformers==5.23.0 twisted==26.10.0 wagtail==8.0.1"
).split()
SUFFIXES = (".py", ".md", ".rst", ".txt")
SIZES = range(300, 200_000)  # bytes of a file: larger ones are tables
NEW = 0.75  # least part of a file on lines of its own
LONG = 24  # shortest line that counts, in bytes
MOST = 16e6  # bytes of a package


def download(folder: pathlib.Path) -> None:
    """Downloads the packages that are not in the folder yet, without those that they need."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *PACKAGES], check=True)


def files_of(root: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Yields the path and the content of each file of a wheel, or below a folder, in order."""
    if root.is_file():
        with zipfile.ZipFile(root) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(SUFFIXES):
                    yield name, wheel.read(name)
        return
    for folder, below, names in os.walk(root):
        below.sort()
        for path in (pathlib.Path(folder, name) for name in sorted(names)):
            if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix(), path.read_bytes()


def new_texts(roots: Sequence[pathlib.Path]) -> Iterator[tuple[str, bytes]]:
    """Yields the package and the content of each file with enough new lines."""
    known: set[bytes] = set()
    for root in roots:
        for name, content in files_of(root):
            if len(content) not in SIZES or b"\0" in content:
                continue
            try:
                content.decode()
            except UnicodeDecodeError:
                continue
            lines = {line: b"" for line in content.split(b"\n") if len(line.strip()) >= LONG}
            for line in lines:
                lines[line] = hashlib.blake2b(line.strip(), digest_size=8).digest()
            new = sum(len(line) for line, digest in lines.items() if digest not in known)
            if lines and new >= NEW * sum(map(len, lines)):
                known.update(lines.values())
                yield package(name), content


def package(name: str) -> str:
    return name.rpartition("site-packages/")[2].partition("/")[0]


def held_out_bytes(trained: int) -> int:
    """Returns how many bytes more make the trainer hold out just these."""
    total = math.floor(trained / (1 - HELD_OUT)) - 2
    while total - math.floor(total * HELD_OUT) < trained:
        total += 1
    return total - trained


def write(path: pathlib.Path, text: bytes) -> None:
    # The dictionary holds the whole text: shuffled files of one package are far apart.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 28}]
    path.write_bytes(lzma.compress(text, filters=filters))
    digest = hashlib.sha256(text).hexdigest()[:8]
    print(f"{path}: {len(text):,} bytes in {path.stat().st_size:,}, sha256 {digest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folders", nargs="*", type=pathlib.Path, help="of more sources")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder")
    parser.add_argument("--wheels", type=pathlib.Path, help="where pip's downloads are kept")
    parser.add_argument("--bytes", type=float, default=200.5e6, help="to train on")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        wheels = arguments.wheels or pathlib.Path(temporary)
        download(wheels)
        here = [pathlib.Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
        texts = list(new_texts([*sorted(wheels.glob("*.whl")), *here, *arguments.folders]))
    random.Random(arguments.seed).shuffle(texts)
    parts: tuple[list[bytes], list[bytes]] = [], []
    counts: collections.Counter[str] = collections.Counter()
    sizes, wanted = [0, 0], [arguments.bytes, math.inf]
    for name, content in texts:
        if counts[name] >= MOST:
            continue
        part = int(sizes[0] >= wanted[0])
        parts[part].append(content + b"\n")
        sizes[part] += len(content) + 1
        counts[name] += len(content)
        if part:
            wanted[1] = held_out_bytes(sizes[0])
            if sizes[1] >= wanted[1]:
                break
    else:
        raise SystemExit(f"corpus.py: only {sum(sizes):,} bytes: give more folders, or --bytes.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = [f"{count:>11,} {name}\n" for name, count in counts.most_common()]
    (arguments.out / "sources.txt").write_text("".join(lines))
    print(f"{sum(map(len, parts)):,} of {len(texts):,} files, {len(counts)} packages", flush=True)
    write(arguments.out / "heldout.xz", b"".join(parts[1])[: int(wanted[1])])
    write(arguments.out / "text.xz", b"".join(parts[0]))


if __name__ == "__main__":
    main()
