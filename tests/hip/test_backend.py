"""The shared backend over both vendors' drivers, against fakes that refuse what a driver refuses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import KERNELS, Fake, backend_class, options_of

from uccl_ep_core.device_runtime.driver import DriverError
from uccl_ep_core.device_runtime.windows import WindowHandle, WindowImportError
from uccl_ep_core.errors import ArgumentError, BackendUnavailableError, BufferClosedError, ConfigurationError, EPError
from uccl_ep_hip.driver import HipDriver

INVALID_VALUE = 1


def read(window: Any, nbytes: int) -> bytes:
    return ctypes.string_at(window.device_pointer, nbytes)


# ---- probe and open ----


def test_probe_describes_each_device(fake: Fake) -> None:
    devices = backend_class(fake).probe(fake.files.options)
    vendor = fake.files.vendor
    assert [device.name for device in devices] == [f"{vendor}:0", f"{vendor}:1"]
    assert all(device.usable for device in devices), devices
    assert devices[1].details["pci_address"] == "0000:02:00.0"
    assert devices[0].details["architecture"] == ("gfx942" if vendor == "hip" else "sm_90")


def test_probe_says_why_and_what_helps(fake: Fake) -> None:
    kind = backend_class(fake)
    (missing,) = kind.probe({"library": "/nowhere/libdriver.so"})
    assert not missing.usable
    assert "/nowhere/libdriver.so" in missing.reason
    assert missing.remedy
    fake.configure(devices=0)
    (none,) = kind.probe(fake.files.options)
    assert not none.usable
    assert none.remedy


def test_the_runtime_that_torch_loaded_is_taken(fake: Fake, tmp_path: Path) -> None:
    if fake.files.vendor != "hip":
        pytest.skip("no build of torch brings the other vendor's driver")
    bundled = tmp_path / "libamdhip64.so.6"
    bundled.write_bytes(fake.files.driver.read_bytes())
    program = (
        f"import ctypes; ctypes.CDLL({str(bundled)!r}); from uccl_ep_hip import HipBackend; "
        "print(HipBackend.open_driver({}).library_path)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(bundled), done.stderr


def test_real_backend_refuses_torch_without_its_vendor(fake: Fake) -> None:
    real = backend_class(fake).__mro__[1]
    device = real.probe(fake.files.options)[0]
    assert not device.usable
    assert "not a build for" in device.reason
    with pytest.raises(BackendUnavailableError, match="install a"):
        real.open("0", fake.files.options)


def test_old_architecture_is_refused(fake: Fake) -> None:
    if fake.files.vendor != "hip":
        pytest.skip("the fake of the other vendor has one architecture")
    fake.configure(architecture="gfx803")
    device = backend_class(fake).probe(fake.files.options)[0]
    assert not device.usable
    assert "gfx803" in device.reason


@pytest.mark.parametrize("device", ["tpu:0", "7", "cuda:x"])
def test_wrong_device_names_are_refused(fake: Fake, tmp_path: Path, device: str) -> None:
    with pytest.raises(BackendUnavailableError, match="there is no device"):
        backend_class(fake).open(device, options_of(fake, tmp_path))


def test_open_during_capture_is_refused(fake: Fake, tmp_path: Path) -> None:
    fake.library.fake_set_capturing(1)
    with pytest.raises(ConfigurationError, match="before the capture"):
        backend_class(fake).open("0", options_of(fake, tmp_path))
    assert fake.count("modules") == 0


def test_too_many_blocks_are_refused(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="at most 4"):
        backend_class(fake).open("0", {**options_of(fake, tmp_path), "max_blocks": 5})


def test_other_device_is_current_only_inside_calls(fake: Fake, tmp_path: Path) -> None:
    kind = backend_class(fake)
    first, second = kind.open("0", options_of(fake, tmp_path)), kind.open("1", options_of(fake, tmp_path))
    try:
        assert first.allocate_device_memory(64).memory.device == 0
        assert second.allocate_device_memory(64).memory.device == 1
        assert first.export_window(first.allocate_data_window(64, for_transport=False, device_memory=False))
    finally:
        first.close()
        second.close()


# ---- memory ----


def test_windows_are_zeroed_and_freed(fake: Fake, backend: Any) -> None:
    before = fake.count("allocations"), fake.count("registrations")
    data = backend.allocate_data_window(5000, for_transport=False, device_memory=False)
    private = backend.allocate_device_memory(100)
    host = backend.allocate_host_window(8192)
    assert read(data, 5000) == bytes(5000)
    assert read(private, 100) == bytes(100)
    assert read(host, 8192) == bytes(8192)
    assert (data.memory.nbytes, data.memory.device) == (5000, 0)
    assert host.memory.device is None
    assert host.memory.share_handle
    assert fake.library.fake_reaches(host.device_pointer, 8192)
    assert not fake.library.fake_reaches(host.memory.pointer, 8), "kernels must be given the mapped address"
    for window in (data, private, host):
        window.close()
        window.close()
    assert (fake.count("allocations"), fake.count("registrations")) == before


def test_exported_memory_is_rounded_so_that_it_shares_no_page(fake: Fake, backend: Any) -> None:
    data = backend.allocate_data_window(5000, for_transport=False, device_memory=False)
    assert fake.library.fake_reaches(data.device_pointer, 2 << 20)
    assert not fake.library.fake_reaches(data.device_pointer, (2 << 20) + 1)


def test_polled_memory_is_uncached_where_caches_would_hide_writes(fake: Fake, backend: Any) -> None:
    if fake.files.vendor != "hip":
        pytest.skip("the other vendor's caches are coherent with peers")
    data = backend.allocate_data_window(4096, for_transport=False, device_memory=False)
    assert fake.library.fake_kind(data.device_pointer) == 3
    assert fake.library.fake_kind(backend.allocate_device_memory(64).device_pointer) == 0


@pytest.mark.parametrize(("architecture", "kind"), [("gfx90a", 1), ("gfx942", 3), ("gfx950", 3), ("gfx1201", 1)])
def test_polled_memory_is_fine_grained_on_the_others(fake: Fake, architecture: str, kind: int) -> None:
    if fake.files.vendor != "hip":
        pytest.skip("the other vendor's caches are coherent with peers")
    fake.configure(architecture=f"{architecture}:xnack-")
    driver = HipDriver((str(fake.files.driver),))  # one of its own: a driver asks for the architecture once
    driver.attach(0)
    polled, private = driver.allocate(4096, polled_by_peers=True), driver.allocate(4096, polled_by_peers=False)
    assert (fake.library.fake_kind(polled), fake.library.fake_kind(private)) == (kind, 0)
    driver.free(polled)
    driver.free(private)


def test_host_staged_and_registrable_windows(fake: Fake, backend: Any) -> None:
    staged = backend.allocate_data_window(4096, for_transport=True, device_memory=False)
    assert staged.memory.device is None
    direct = backend.allocate_data_window(4096, for_transport=True, device_memory=True)
    assert direct.memory.device == 0
    if fake.files.vendor == "cuda":
        assert direct.memory.dmabuf_fd is not None
        os.fstat(direct.memory.dmabuf_fd)
        descriptor = direct.memory.dmabuf_fd
        direct.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_copy_to_device_stays_inside(backend: Any) -> None:
    window = backend.allocate_device_memory(16)
    backend.copy_to_device(window, b"abcd", 12)
    assert read(window, 16) == bytes(12) + b"abcd"
    with pytest.raises(ArgumentError, match=r"\[13, 17\)"):
        backend.copy_to_device(window, b"abcd", 13)


def test_copy_from_device_stays_inside(backend: Any) -> None:
    window = backend.allocate_device_memory(16)
    backend.copy_to_device(window, b"abcd", 12)
    assert backend.copy_from_device(window, 6, 10) == b"\0\0abcd"
    assert backend.copy_from_device(window, 0) == b""
    with pytest.raises(ArgumentError, match=r"\[13, 17\)"):
        backend.copy_from_device(window, 4, 13)


def test_failed_steps_leave_nothing_behind(fake: Fake, backend: Any) -> None:
    hip = fake.files.vendor == "hip"
    before = fake.count("allocations"), fake.count("registrations")
    for call in (("hipMemsetAsync", "cuMemsetD8Async"), ("hipIpcGetMemHandle", "cuIpcGetMemHandle")):
        fake.fail_next(call[0 if hip else 1], INVALID_VALUE)
        with pytest.raises(DriverError, match="invalid argument"):
            backend.allocate_data_window(4096, for_transport=False, device_memory=False)
    fake.fail_next("hipHostGetDevicePointer" if hip else "cuMemHostGetDevicePointer_v2", INVALID_VALUE)
    with pytest.raises(DriverError) as caught:
        backend.allocate_host_window(4096)
    assert "GetDevicePointer" in str(caught.value)
    assert (fake.count("allocations"), fake.count("registrations")) == before


# ---- between processes ----

_IMPORTER = """
import ctypes, sys
sys.path[:0] = {path!r}
import fakes
fake = fakes.Fake(fakes.FakeFiles({vendor!r}, *map(fakes.Path, {files!r})))
fake.configure(peer_access={peer_access})
backend = fakes.backend_class(fake).open({device!r}, {options!r})
for handle in {handles!r}:
    window = backend.import_window(handle)
    ctypes.memmove(window.device_pointer, b"written by a peer", 17)
    window.close()
backend.close()
print("live", fake.count("allocations"), fake.count("registrations"))
"""


def run_importer(
    fake: Fake, tmp_path: Path, handles: list[bytes], device: str, peer_access: bool
) -> subprocess.CompletedProcess[str]:
    files = fake.files
    program = _IMPORTER.format(
        path=[str(Path(__file__).parent)],
        vendor=files.vendor,
        files=[str(files.driver), str(files.compiler), str(files.image)],
        peer_access=peer_access,
        device=device,
        options=options_of(fake, tmp_path),
        handles=handles,
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("device", ["0", "1"])
def test_peers_map_windows(fake: Fake, backend: Any, tmp_path: Path, device: str) -> None:
    data = backend.allocate_data_window(4096, for_transport=False, device_memory=False)
    host = backend.allocate_host_window(4096)
    done = run_importer(fake, tmp_path, [backend.export_window(data), backend.export_window(host)], device, True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "live 0 0\n"
    assert read(data, 17) == b"written by a peer"
    assert read(host, 17) == b"written by a peer"


def test_peer_access_is_detected(fake: Fake, backend: Any, tmp_path: Path) -> None:
    data = backend.allocate_data_window(4096, for_transport=False, device_memory=False)
    handle = backend.export_window(data)
    refused = run_importer(fake, tmp_path, [handle], "1", False)
    assert refused.returncode != 0
    assert "no peer access" in refused.stderr
    same_device = run_importer(fake, tmp_path, [handle], "0", False)
    assert same_device.returncode == 0, same_device.stderr


def test_ranks_of_one_process_share_addresses(backend: Any) -> None:
    data = backend.allocate_data_window(4096, for_transport=False, device_memory=False)
    imported = backend.import_window(backend.export_window(data))
    assert imported.device_pointer == data.device_pointer
    imported.close()
    assert read(data, 8) == bytes(8), "closing an import must not free the owner's memory"


def test_foreign_handles_are_refused(fake: Fake, backend: Any) -> None:
    data = backend.allocate_data_window(4096, for_transport=False, device_memory=False)
    handle = WindowHandle.unpack(backend.export_window(data))
    fields = {name: getattr(handle, name) for name in handle.__dataclass_fields__}
    for change, words in (
        ({"host": "another"}, "another machine"),
        ({"driver": "other"}, "memory of other"),
    ):
        with pytest.raises(WindowImportError, match=words):
            backend.import_window(WindowHandle(**(fields | change)).pack())
    with pytest.raises(WindowImportError, match="not a window handle"):
        backend.import_window(b"garbage")
    with pytest.raises(DriverError):
        backend.import_window(WindowHandle(**(fields | {"process": "1-other", "payload": bytes(64)})).pack())
    with pytest.raises(ArgumentError, match="private"):
        backend.export_window(backend.allocate_device_memory(64))


# ---- streams and events ----


def test_events_wait_and_time_out(fake: Fake, backend: Any) -> None:
    events = fake.count("events")
    event = backend.record_event()
    event.wait()
    event.wait(backend.communication_stream())
    assert event.synchronize(1.0)
    fake.library.fake_set_not_ready(3)
    assert event.synchronize(1.0), "it is ready at the fourth look"
    fake.library.fake_set_not_ready(1 << 30)
    assert not event.synchronize(0.01)
    assert not backend.synchronize(None, 0.01)
    fake.library.fake_set_not_ready(0)
    assert backend.synchronize(backend.communication_stream(), 1.0)
    del event
    assert fake.count("events") == events


def test_wrong_streams_are_refused(backend: Any) -> None:
    with pytest.raises(DriverError):
        backend.record_event(12345)
    with pytest.raises(DriverError):
        backend.record_event().wait(12345)


# ---- launches ----


def parameters(kernel: str) -> bytes:
    return bytes(i % 251 for i in range(ctypes.sizeof(KERNELS[kernel])))


def test_launch_passes_bytes_and_shape(fake: Fake, backend: Any) -> None:
    seen: list[Any] = []

    def run(name: str, at: int, blocks: int, threads: int, shared: int) -> int:
        seen.append((name, ctypes.string_at(at, ctypes.sizeof(KERNELS[name])), blocks, threads, shared))
        return 0

    fake.set_launcher(run)
    fake.journal()
    staging = backend.facts.staging_bytes
    kernels = [kernel for kernel in KERNELS if kernel != "uccl_ep_clock"]  # which traced kernels alone come with
    for kernel in kernels:
        backend.launch(kernel, parameters(kernel), num_blocks=2, warps_per_block=3, shared_bytes=100)
    warp = 64 if fake.files.vendor == "hip" else 32
    assert seen == [(kernel, parameters(kernel), 2, 3 * warp, 128 + staging) for kernel in kernels]
    assert sum("Cooperative" in call for call in fake.journal()) == len(kernels)
    backend.launch(
        "uccl_ep_barrier", parameters("uccl_ep_barrier"), num_blocks=100, warps_per_block=1, cooperative=False
    )
    assert not any("Cooperative" in call for call in fake.journal())


def test_a_launch_can_have_all_the_shared_memory_of_the_limits(fake: Fake, backend: Any) -> None:
    launches = fake.count("launches")
    most = backend.limits.max_shared_bytes
    arguments = {"num_blocks": 2, "warps_per_block": 1, "shared_bytes": most}
    backend.launch("uccl_ep_barrier", parameters("uccl_ep_barrier"), **arguments)
    assert fake.count("launches") == launches + 1
    with pytest.raises(ArgumentError, match=f"shared_bytes = {most + 1}: at most {most}"):
        backend.launch("uccl_ep_barrier", parameters("uccl_ep_barrier"), **{**arguments, "shared_bytes": most + 1})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernel": "uccl_ep_dispach"}, "did you mean 'uccl_ep_dispatch'"),
        ({"num_blocks": 5}, "1 to 4"),
        ({"num_blocks": 0}, "1 to 4"),
        ({"warps_per_block": 100}, "warps_per_block = 100: must be 1 to"),
        ({"shared_bytes": 1 << 20}, "at most"),
    ],
)
def test_launches_that_cannot_run_are_refused(fake: Fake, backend: Any, change: dict[str, Any], words: str) -> None:
    launches = fake.count("launches")
    arguments = {"kernel": "uccl_ep_barrier", "num_blocks": 1, "warps_per_block": 1, **change}
    with pytest.raises(ArgumentError, match=words):
        backend.launch(arguments.pop("kernel"), parameters("uccl_ep_barrier"), **arguments)
    assert fake.count("launches") == launches


def test_parameters_of_another_build_are_refused(fake: Fake, backend: Any) -> None:
    if fake.files.vendor != "hip":
        pytest.skip("the fake of the other vendor is an older driver, which cannot say")
    with pytest.raises(ArgumentError, match="different builds"):
        backend.launch("uccl_ep_barrier", bytes(8), num_blocks=1, warps_per_block=1)


def test_kernels_of_another_layout_are_not_loaded(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fake.files.vendor != "hip":
        pytest.skip("the other vendor's objects do not say what their kernels take")
    modules = fake.count("modules")
    monkeypatch.setenv("FAKE_COMPILER_IMAGE", str(fake.files.split))
    with pytest.raises(EPError, match=r"kernel uccl_ep_dispatch takes .* not one struct"):
        backend_class(fake).open("0", options_of(fake, tmp_path))
    assert fake.count("modules") == modules


def test_without_cooperative_launch_residency_is_still_checked(fake: Fake, tmp_path: Path) -> None:
    fake.configure(cooperative=False)
    backend = backend_class(fake).open("0", options_of(fake, tmp_path))
    fake.journal()
    backend.launch("uccl_ep_barrier", parameters("uccl_ep_barrier"), num_blocks=4, warps_per_block=1)
    calls = fake.journal()
    assert not any("Cooperative" in call for call in calls)
    assert any("Occupancy" in call for call in calls)
    backend.close()


def test_launch_failures_carry_the_vendors_words(fake: Fake, backend: Any) -> None:
    call = "hipModuleLaunchKernel" if fake.files.vendor == "hip" else "cuLaunchKernel"
    fake.fail_next(call, INVALID_VALUE)
    with pytest.raises(DriverError, match=f"{call} failed: .*invalid argument"):
        backend.launch("uccl_ep_barrier", parameters("uccl_ep_barrier"), num_blocks=1, warps_per_block=1)


# ---- the end ----


def test_close_frees_everything_and_ends_use(fake: Fake, tmp_path: Path) -> None:
    before = [fake.count(what) for what in ("allocations", "registrations", "modules")]
    streams = fake.count("streams")
    backend = backend_class(fake).open("0", options_of(fake, tmp_path))
    backend.allocate_device_memory(64)
    kept = [
        backend.allocate_host_window(64),
        backend.allocate_data_window(64, for_transport=False, device_memory=False),
    ]
    backend.close()
    backend.close()
    assert [fake.count(what) for what in ("allocations", "registrations", "modules")] == before
    assert fake.count("streams") <= streams + 1, "only the process's own stream stays"
    for window in kept:
        window.close()
    with pytest.raises(BufferClosedError):
        backend.allocate_host_window(64)
