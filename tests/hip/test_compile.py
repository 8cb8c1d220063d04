"""Compilation at first use: in a process of its own, kept on disk, once for all ranks."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fakes import Fake, backend_class, options_of

from uccl_ep_core.device_runtime.compile_cache import CompileCache, CompileTimeoutError, cache_key
from uccl_ep_core.device_runtime.compiler import CompileError, CompilerLibrary, run_compiler
from uccl_ep_core.device_runtime.objects import find_object, write_manifest
from uccl_ep_core.device_runtime.sources import Unit
from uccl_ep_core.errors import BackendUnavailableError


def compiler_of(fake: Fake) -> CompilerLibrary:
    prefix, code = ("hiprtc", "Code") if fake.files.vendor == "hip" else ("nvrtc", "CUBIN")
    return CompilerLibrary((str(fake.files.compiler),), prefix, code)


def compile_something(fake: Fake, timeout_s: float = 60.0) -> Any:
    return run_compiler(
        compiler_of(fake), name="unit", source="x", headers={"a/b.hpp": "y"}, options=("-O3",), timeout_s=timeout_s
    )


# ---- the compiler's process ----


def test_image_and_log_come_back(fake: Fake) -> None:
    compiled = compile_something(fake)
    assert compiled.image == fake.files.image.read_bytes()
    assert compiled.log.split("\n") == ["header a/b.hpp", "option -O3"]


def test_refused_source_raises_with_the_log(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_COMPILER_MODE", "refuse")
    with pytest.raises(CompileError, match="error: refused by request") as caught:
        compile_something(fake)
    assert "-O3" in str(caught.value)


def test_a_compiler_that_aborts_is_an_exception_here(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_COMPILER_MODE", "crash")
    with pytest.raises(CompileError, match="signal 6 while compiling unit; install another release"):
        compile_something(fake)


def test_a_compiler_that_hangs_is_stopped(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_COMPILER_MODE", "hang")
    with pytest.raises(CompileError, match=r"more than 0\.5 s"):
        compile_something(fake, timeout_s=0.5)


def test_missing_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"libnone\.so"):
        run_compiler(
            CompilerLibrary((str(tmp_path / "libnone.so"),), "nvrtc", "CUBIN"),
            name="unit",
            source="",
            headers={},
            options=(),
        )


def test_the_caller_can_shadow_nothing(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported the wrong json')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert compile_something(fake).image


# ---- opening a backend ----


def test_second_open_compiles_nothing(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "counter"
    monkeypatch.setenv("FAKE_COMPILER_COUNTER", str(counter))
    for _ in range(2):
        backend_class(fake).open("0", options_of(fake, tmp_path)).close()
    assert counter.read_text() == "compiled\n"


def test_traced_kernels_are_another_build(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled from the source that has the macro, kept apart, never taken from the package's objects."""
    counter, objects = tmp_path / "counter", tmp_path / "objects"
    monkeypatch.setenv("FAKE_COMPILER_COUNTER", str(counter))
    module = importlib.import_module(f"uccl_ep_{fake.files.vendor}.build")
    (unit,) = module.OFFLINE.units()
    objects.mkdir()
    (objects / "k.o").write_bytes(fake.files.image.read_bytes())

    def opened(traced: bool) -> tuple[str, int]:
        backend = backend_class(fake).open("0", {**options_of(fake, tmp_path), "trace_kernels": traced})
        assert backend.traces_kernels == traced
        ((name, origin),) = backend.describe()["kernels"].items()
        assert name == ("traced_kernels" if traced else "kernels")
        write_manifest(objects, [
            {"unit": unit.name, "digest": unit.digest, "architecture": backend.facts.architecture, "file": "k.o"}
        ])  # fmt: skip
        shared = backend.limits.max_shared_bytes
        backend.close()
        return origin, shared

    monkeypatch.setattr(module, "_OBJECTS", objects)
    (plain, room), (traced, less_room) = opened(False), opened(True)
    assert plain.startswith("compiled by") and traced.startswith("compiled by")
    assert opened(True)[0] == traced and counter.read_text() == "compiled\n" * 2
    assert opened(False)[0] == "built with the package" and counter.read_text() == "compiled\n" * 2
    assert room - less_room == 128, "for the words in which warps count"


def test_ranks_that_start_together_compile_once(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "counter"
    monkeypatch.setenv("FAKE_COMPILER_COUNTER", str(counter))
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import fakes; "
        f"fake = fakes.Fake(fakes.FakeFiles({fake.files.vendor!r}, "
        f"*map(fakes.Path, {[str(fake.files.driver), str(fake.files.compiler), str(fake.files.image)]!r}))); "
        f"fakes.backend_class(fake).open('0', {options_of(fake, tmp_path)!r}).close()"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) for _ in range(3)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors.decode()
    assert counter.read_text() == "compiled\n"


def test_without_a_compiler_the_remedy_is_said(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = (
        "uccl_ep_hip.build.toolchain.find_hiprtc"
        if fake.files.vendor == "hip"
        else "uccl_ep_cuda.build.nvrtc.find_nvrtc"
    )
    monkeypatch.setattr(module, lambda *arguments: None)
    with pytest.raises(BackendUnavailableError, match="install"):
        backend_class(fake).open("0", options_of(fake, tmp_path))
    assert fake.count("modules") == 0


# ---- the cache ----


def private(tmp_path: Path) -> Path:
    folder = tmp_path / "entries"
    folder.mkdir(mode=0o700)
    return folder


def test_entries_are_private_and_checked(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "new" / "folder")
    assert cache.problem == ""
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    assert cache.get("key", lambda: b"code") == b"code"
    assert cache.get("key", lambda: b"other") == b"code"
    (entry,) = cache.directory.glob("*.bin")
    assert entry.stat().st_mode & 0o077 == 0
    entry.write_bytes(entry.read_bytes()[:-1])  # as a crash may leave it
    assert cache.get("key", lambda: b"again") == b"again"
    assert cache.get("key", lambda: b"other") == b"again"
    assert not list(cache.directory.glob(".new-*"))


def test_a_folder_others_can_write_is_not_used(tmp_path: Path) -> None:
    folder = private(tmp_path)
    folder.chmod(0o777)
    cache = CompileCache(folder)
    assert "other users can write" in cache.problem
    assert cache.get("key", lambda: b"code") == b"code"
    assert cache.get("key", lambda: b"other") == b"other", "nothing may be read from there"


def test_a_failed_compilation_leaves_no_entry(tmp_path: Path) -> None:
    cache = CompileCache(private(tmp_path))

    def fail() -> bytes:
        raise CompileError("no")

    with pytest.raises(CompileError):
        cache.get("key", fail)
    assert cache.get("key", lambda: b"code") == b"code"


def test_waiting_for_another_rank_has_a_limit(tmp_path: Path) -> None:
    folder = private(tmp_path)
    inside, leave = threading.Event(), threading.Event()

    def slow() -> bytes:
        inside.set()
        assert leave.wait(30)
        return b"code"

    holder = threading.Thread(target=lambda: CompileCache(folder).get("key", slow))
    holder.start()
    assert inside.wait(30)
    with pytest.raises(CompileTimeoutError, match=r"0\.1 s"):
        CompileCache(folder).get("key", lambda: b"other", timeout_s=0.1)
    leave.set()
    holder.join(30)
    assert CompileCache(folder).get("key", lambda: b"other") == b"code"


def test_keys_separate_their_parts() -> None:
    assert cache_key("ab", "c") != cache_key("a", "bc")
    assert cache_key("ab", "c") == cache_key("ab", b"c")


def test_compiler_releases_have_different_keys(fake: Fake, tmp_path: Path) -> None:
    copy = tmp_path / fake.files.compiler.name
    copy.write_bytes(fake.files.compiler.read_bytes())
    os.utime(copy, ns=(1, 1))
    assert CompilerLibrary((str(copy),), "a", "b").identity != compiler_of(fake).identity


# ---- objects of the package ----


def test_objects_count_only_for_their_sources_and_architecture(tmp_path: Path) -> None:
    unit = Unit("kernels", "source", {"a.hpp": "text"}, ("kernel",))
    (tmp_path / "k.o").write_bytes(b"object")
    entry = {"unit": "kernels", "digest": unit.digest, "architecture": "one", "file": "k.o"}
    write_manifest(tmp_path, [entry])
    assert find_object(tmp_path, "kernels", unit.digest, lambda a: a == "one") == b"object"
    assert find_object(tmp_path, "kernels", unit.digest, lambda a: a == "two") is None
    for changed in (
        Unit("kernels", "source ", {"a.hpp": "text"}, ("kernel",)),
        Unit("kernels", "source", {"a.hpp": "text "}, ("kernel",)),
        Unit("kernels", "source", {"b.hpp": "text"}, ("kernel",)),
    ):
        assert find_object(tmp_path, "kernels", changed.digest, lambda a: True) is None
    assert find_object(tmp_path / "none", "kernels", unit.digest, lambda a: True) is None
