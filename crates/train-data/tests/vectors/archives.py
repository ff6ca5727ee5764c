"""Writes the archives of src/stream/tar.rs's tests: by GNU tar 1.34 in four formats, and by Python 3.11's tarfile.

2026-11-27. Run in this folder: python archives.py
"""

import os
import pathlib
import shutil
import subprocess
import tarfile
import tempfile


def write(root: pathlib.Path, long: str) -> list[str]:
    files = {
        "set/0.cls": "3",
        "set/0.JPG": "image 0",
        "set/0.seg.png": "mask",
        "set/README": "no record: its name has no dot",
        "set/.hidden": "no record: nothing stands before the dot",
        "set/1.cls": "",
        "set/1.jpg": "1" * 1024,
        "set/\u00e9.txt": "accent",
        f"set/{long}2.cls": "4",
        f"set/{long}2.jpg": "image 2",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    os.symlink("0.cls", root / "set/link")
    names = ["set/0.cls", "set/0.JPG", "set/0.seg.png", "set/README", "set/.hidden", "set/link"]
    # The folder stands between two records.
    return [*names, "set", *[name for name in files if name not in names]]


def main() -> None:
    here = pathlib.Path(__file__).parent.resolve()
    for format in ["v7", "ustar", "gnu", "posix", "python"]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            # A name of the first format has at most 99 bytes.
            names = write(root, "long/" * (1 if format == "v7" else 40))
            archive = here / f"{format}.tar"
            if format == "python":
                with tarfile.open(archive, "w") as tar:
                    for name in names:
                        tar.add(root / name, name, recursive=False)
            else:
                command = ["tar", "--create", f"--format={format}", "--no-recursion", "--file", archive, *names]
                subprocess.run(command, cwd=root, check=True)
            subprocess.run(["gzip", "--force", "--best", "--no-name", archive], check=True)


main()
