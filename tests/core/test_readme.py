"""The example of the README runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.skipif(not README.is_file(), reason="needs the checkout")
@pytest.mark.parametrize("domain_size", ["0", "1"])
def test_example_of_the_readme(tmp_path: Path, domain_size: str) -> None:
    example = tmp_path / "example.py"
    (code,) = re.findall(r"```python\n(# example\.py.*?)```", README.read_text(), flags=re.DOTALL)
    example.write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCCL_EP_")}
    environment |= {"UCCL_EP_DOMAIN_SIZE": domain_size, "UCCL_EP_TIMEOUT_S": "120", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank \d", done.stdout)) == ["rank 0", "rank 1"]
