"""What Echelon adds to `import torch`: `python benchmarks/import_hook.py`.

Each sample is a fresh interpreter that imports torch with the autoloading of backends switched off, then loads and
calls Echelon's entry point as PyTorch would, and times that; beside it the time of `import torch` itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

SAMPLES = 15
LIMIT_MS = 50
SAMPLE = """
import time
begin = time.perf_counter()
import torch
imported = time.perf_counter()
from importlib.metadata import entry_points
found = [entry for entry in entry_points(group="torch.backends") if entry.name == "echelon"]
assert len(found) == 1, "Echelon is not installed here"
start = time.perf_counter()
found[0].load()()
print(1e3 * (time.perf_counter() - start), 1e3 * (imported - begin))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    environment = dict(os.environ) | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    hook, torch = [], []
    for _ in range(SAMPLES):
        output = subprocess.run(
            [sys.executable, "-c", SAMPLE], env=environment, capture_output=True, text=True, check=True
        ).stdout
        added, whole = map(float, output.split())
        hook.append(added)
        torch.append(whole)
    result = {
        "what": __doc__.splitlines()[0],
        "hook_ms": {"median": statistics.median(hook), "largest": max(hook)},
        "import_torch_ms": {"median": statistics.median(torch)},
        "limit_ms": LIMIT_MS,
    }
    print(f"the hook: median {statistics.median(hook):.1f} ms, largest {max(hook):.1f} of {SAMPLES} (limit {LIMIT_MS})")
    print(f"import torch: median {statistics.median(torch):.0f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
