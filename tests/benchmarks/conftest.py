"""The benchmarks are scripts beside the package: their modules are found as the scripts find them."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
