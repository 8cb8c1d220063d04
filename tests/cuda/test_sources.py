"""What holds of the device sources without any compiler: equal primitives everywhere, no vendor in an algorithm."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from uccl_ep_core import kernels_compile
from uccl_ep_core.device_runtime.compiler import CompileError
from uccl_ep_core.device_runtime.objects import find_object
from uccl_ep_core.device_runtime.offline import (
    KernelResources,
    OfflineBuild,
    OfflineCompiler,
    check_complete,
    offline_compiler,
)
from uccl_ep_core.device_runtime.resource_table import read_table, regressions, write_table
from uccl_ep_core.device_runtime.sources import Unit
from uccl_ep_hip.build import STATIC_SHARED_BYTES

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = sorted((ROOT / "core" / "kernels").glob("*.*"))
BACKENDS = ("host", "cuda", "hip")

# Words of one vendor: types, built-ins, instructions, products.
VENDOR = re.compile(
    r"cuda|nvidia|\bnv[a-z]*\b|nvlink|ptx|\bhip|rocm|\bamd|gfx\d|\bsm_\d|xgmi|__shfl|__ballot|__syncthreads|__syncwarp|__global__|"
    r"threadIdx|blockIdx|\basm\b|__builtin_|__nv_|__hip",
    re.IGNORECASE,
)


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.name)
def test_algorithms_name_no_vendor(path: Path) -> None:
    found = [f"{number}: {line}" for number, line in enumerate(path.read_text().splitlines(), 1) if VENDOR.search(line)]
    assert not found, "\n".join(found)


def test_the_search_for_vendors_finds_one() -> None:
    assert VENDOR.search("const int lane = threadIdx.x % 32;")
    assert VENDOR.search("// as the PTX model says")
    assert not VENDOR.search("// a warp of the device, over the scale-up domain")


def declared(backend: str) -> set[str]:
    """Names that a backend's primitives put into the namespace of the primitives."""
    text = (ROOT / "gpu_backends" / backend / "native" / "primitives.hpp").read_text()
    body = text[text.index("namespace uccl_ep::device {\n") :]
    functions = re.findall(r"^(?:UCCL_EP_DEVICE|inline|static|template)\b[^;{=]*?\b(\w+)\(", body, re.MULTILINE)
    constants = re.findall(r"^inline constexpr \w+ (\w+) =", body, re.MULTILINE)
    types = re.findall(r"^using (\w+) =", body, re.MULTILINE)
    return {*functions, *constants, *types}


def test_every_primitive_that_is_used_exists_everywhere() -> None:
    used = {name for path in ALGORITHMS for name in re.findall(r"\bdevice::(\w+)", path.read_text())}
    assert used, "the kernels use no primitive at all?"
    for backend in BACKENDS:
        assert not used - declared(backend), f"missing in {backend}"


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_no_vendor_header_is_included(backend: str) -> None:
    for path in (ROOT / "gpu_backends" / backend / "native").glob("*.hpp"):
        assert not re.search(r"#\s*include\s*<", path.read_text()), path


@pytest.mark.parametrize("package", ["uccl_ep_cuda", "uccl_ep_hip"])
def test_units_hold_all_kernels_and_headers(package: str) -> None:
    (unit,), (traced,) = offline_compiler(package).units(), offline_compiler(package).units(traced=True)
    declared_kernels = {
        name for path in ALGORITHMS for name in re.findall(r"^UCCL_EP_KERNEL\((\w+)", path.read_text(), re.M)
    }
    assert set(traced.kernels) == declared_kernels
    assert set(unit.kernels) == declared_kernels - {"uccl_ep_clock"}  # of use to a trace alone
    for one in (unit, traced):
        assert "primitives.hpp" in one.headers
        included = {name for text in one.headers.values() for name in re.findall(r'#include "([^"]+)"', text)}
        assert included <= set(one.headers)


@pytest.mark.parametrize("package", ["uccl_ep_cuda", "uccl_ep_hip"])
def test_only_the_traced_build_records_spans(package: str) -> None:
    """What the compiler is given differs by a macro, which comes before all else; and so does the name in caches."""
    (unit,), (traced,) = offline_compiler(package).units(), offline_compiler(package).units(traced=True)
    lines = [line for line in traced.source.splitlines() if line.startswith("#")]
    assert lines[:3] == ["#pragma once", "#define UCCL_EP_TRACE_KERNELS", '#include "kernels.hpp"']
    for text in (unit.source, *unit.headers.values()):
        assert "define UCCL_EP_TRACE_KERNELS" not in text
    assert traced.headers["kernels.hpp"] == unit.source
    assert (traced.name, unit.name) == ("traced_kernels", "kernels") and traced.digest != unit.digest


def test_figures_of_threads_and_staging_agree() -> None:
    from uccl_ep_cuda import build as cuda
    from uccl_ep_hip import build as hip

    for backend, threads in (("cuda", cuda.MAX_THREADS_PER_BLOCK), ("hip", hip.MAX_THREADS_PER_BLOCK)):
        text = (ROOT / "gpu_backends" / backend / "native" / "primitives.hpp").read_text()
        assert f"#define UCCL_EP_MAX_THREADS {threads}\n" in text
    staging = (ROOT / "gpu_backends" / "cuda" / "native" / "staging.hpp").read_text()
    sizes = [int(kib) << 10 for kib in re.findall(r"kStagingBytes = (\d+) << 10", staging)]
    assert sizes == [cuda.staging_bytes("sm_90"), cuda.staging_bytes("sm_80")]
    assert cuda.staging_bytes("sm_100") == cuda.staging_bytes("sm_103") == sizes[0]
    assert cuda.staging_bytes("sm_89") == cuda.staging_bytes("sm_120") == sizes[1]


def test_machine_code_runs_on_later_minor_versions_only() -> None:
    from uccl_ep_cuda.build import runs_on

    assert runs_on("sm_80", "sm_89")
    assert runs_on("sm_100", "sm_103")
    assert not runs_on("sm_80", "sm_90")
    assert not runs_on("sm_103", "sm_100")
    assert not runs_on("sm_100", "sm_120")


# ---- the table of registers and spills ----


def test_table_reports_spills_growth_and_strangers(tmp_path: Path) -> None:
    accepted = {"one": {"a": KernelResources(100, stack_bytes=64), "b": KernelResources(10)}}
    write_table(tmp_path / "t.json", accepted)
    assert read_table(tmp_path / "t.json") == accepted
    assert read_table(tmp_path / "none.json") == {}
    assert regressions(accepted, accepted) == []
    assert regressions(accepted, {"one": {"a": KernelResources(110, stack_bytes=64)}}) == []
    now = {
        "one": {"a": KernelResources(140, stack_bytes=64), "b": KernelResources(10, spills=8), "c": KernelResources(1)}
    }
    problems = "\n".join(regressions(accepted, now))
    assert "a on one: registers grew from 100 to 140" in problems
    assert "b on one spills (8)" in problems
    assert "c on one is not in the table" in problems


class InventedCompiler(OfflineCompiler):
    """Gives the figures it is told to, for one kernel of one architecture."""

    architectures = ("one",)
    suffix = "o"

    def __init__(self, table: Path) -> None:
        self.table = table
        self.figures = KernelResources(100)

    def unavailable_because(self) -> str:
        return ""

    def units(self, traced: bool = False) -> list[Unit]:
        return [Unit("traced unit" if traced else "unit", "source", {}, ("kernel",))]

    def compile(self, unit: Unit, architecture: str) -> OfflineBuild:
        return OfflineBuild(b"code", {"kernel": self.figures})


def test_make_kernels_fails_where_a_figure_grew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = InventedCompiler(tmp_path / "t.json")
    monkeypatch.setattr(kernels_compile, "offline_compilers", lambda: {"invented": compiler})
    assert kernels_compile.main([]) == 1, "a kernel that no table has"
    assert kernels_compile.main(["--update"]) == 0
    assert kernels_compile.main([]) == 0
    for worse, words in (
        (KernelResources(200), "grew from 100 to 200"),
        (KernelResources(100, spills=1), "spills (1)"),
    ):
        compiler.figures = worse
        capsys.readouterr()
        assert kernels_compile.main([]) == 1
        assert words in capsys.readouterr().err
    assert kernels_compile.main(["--update"]) == 1, "spills are in no table"
    capsys.readouterr()
    assert kernels_compile.main(["--traced"]) == 0, "traced kernels may spill"
    assert "traced unit" in capsys.readouterr().out


def test_tables_cover_all_architectures() -> None:
    for package in ("uccl_ep_cuda", "uccl_ep_hip"):
        compiler = offline_compiler(package)
        table = read_table(compiler.table)
        (unit,) = compiler.units()
        assert set(table) == set(compiler.architectures)
        for kernels in table.values():
            assert set(kernels) == set(unit.kernels)
            assert not any(taken.spills for taken in kernels.values())
            # Beside what a launch may ask for; CUDA's own kernels have none.
            static = STATIC_SHARED_BYTES if package == "uccl_ep_hip" else 0
            assert all(taken.shared_bytes <= static for taken in kernels.values())


def test_a_missing_kernel_is_an_error() -> None:
    (unit,) = offline_compiler("uccl_ep_cuda").units()
    complete = {kernel: KernelResources(1) for kernel in unit.kernels}
    assert check_complete(unit, "sm_90", OfflineBuild(b"", complete))
    complete.popitem()
    with pytest.raises(CompileError, match="lacks the kernels"):
        check_complete(unit, "sm_90", OfflineBuild(b"", complete))


def test_the_assemblers_report_is_read() -> None:
    from uccl_ep_cuda.build import read_resources

    (unit,) = offline_compiler("uccl_ep_cuda").units()
    kernel = unit.kernels[0]
    log = f"""
ptxas info    : Compiling entry function '{kernel}' for 'sm_90'
ptxas info    : Function properties for {kernel}
ptxas         .     336 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 96 registers, used 0 barriers, 336 bytes cumulative stack size, 128 bytes smem
ptxas info    : Function properties for _Zcopy
ptxas         .     0 bytes stack frame, 16 bytes spill stores, 0 bytes spill loads
"""
    assert read_resources(log, unit) == {kernel: KernelResources(96, 336, spills=28, shared_bytes=128)}


def test_the_compilers_remarks_are_read() -> None:
    from uccl_ep_hip.build import read_resources

    log = "\n".join(
        f"remark: <unknown>:0:0: {line} [-Rpass-analysis=kernel-resource-usage]"
        for line in (
            "Function Name: kernel",
            "    VGPRs: 60",
            "    AGPRs: 4",
            "    ScratchSize [bytes/lane]: 16",
            "    Dynamic Stack: False",
            "    SGPRs Spill: 3",
            "    VGPRs Spill: 2",
            "    LDS Size [bytes/block]: 128",
        )
    )
    assert read_resources(log) == {"kernel": KernelResources(64, 16, spills=2, scalar_spills=3, shared_bytes=128)}


def test_shipped_objects_are_found_or_absent() -> None:
    (unit,) = offline_compiler("uccl_ep_cuda").units()
    folder = ROOT / "gpu_backends" / "cuda" / "uccl_ep_cuda" / "objects"
    assert find_object(folder, unit.name, "another digest", lambda architecture: True) is None


def test_a_backend_adds_little_outside_its_folder() -> None:
    """What a second vendor costs elsewhere; docs/backends/hip.md lists these lines."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    words = re.compile(r"\b(hip|hiprtc|rocm|amd|gfx\d+|ziglang|__HIPCC_RTC__|uccl_ep_hip)\b", re.IGNORECASE)
    lines = []
    for name in listing.stdout.split("\0"):
        path = ROOT / name
        if (
            not path.is_file()
            or name.startswith(("gpu_backends/hip/", "uccl_ep/integrations/", "tests/", "docs/"))
            or path.suffix in (".md", ".png")
        ):
            continue
        text = path.read_text(errors="replace")
        if name == "plugins.toml":
            text = text[: text.index("What follows is written by")]  # generated from the plugin's own declaration
        lines += [f"{name}: {line}" for line in text.splitlines() if words.search(line)]
    assert 0 < len(lines) <= 12, "\n".join(lines)
