"""The device as torch sees it: registration, tensors, storages, memory accounting, failures."""

from __future__ import annotations

import gc
import io
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from emulated import _build

pytestmark = pytest.mark.emulated


def test_is_an_accelerator_only_while_configured(emu):
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("emu")
    emu.reset()
    assert not torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 0
    assert torch.accelerator.current_accelerator(check_available=True) is None


def test_tensors_print_and_move(emu):
    x = torch.arange(6.0, device="emu").view(2, 3)
    assert "emu:0" in repr(x)
    assert torch.equal(x.cpu(), torch.arange(6.0).view(2, 3))
    assert torch.equal(x.t().cpu(), torch.arange(6.0).view(2, 3).t())
    assert torch.equal(x.t().contiguous().cpu(), torch.arange(6.0).view(2, 3).t())
    assert x.to(torch.bfloat16).dtype is torch.bfloat16
    assert x[1, 2].item() == 5


VIEWS = {
    "dense": lambda t: t,
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[:, ::2].t(),
    "broadcast": lambda t: t[:1].expand(6, 6),
}


@pytest.mark.parametrize("way", [("cpu", "emu"), ("emu", "cpu"), ("emu", "emu")], ids="-".join)
@pytest.mark.parametrize("view", VIEWS)
def test_copies_change_dtype_and_layout(emu, way, view):
    source, target = way
    for dtype in (torch.float32, torch.bfloat16):
        for target_view in ("dense", "transposed", "strided"):
            values = torch.randn(6, 6 if view != "strided" else 12)
            room = torch.zeros(6, 6 if target_view != "strided" else 12, dtype=dtype)
            on_target = room.to(target, copy=True)
            VIEWS[target_view](room).copy_(VIEWS[view](values))
            VIEWS[target_view](on_target).copy_(VIEWS[view](values.to(source)))
            assert torch.equal(on_target.cpu(), room)


def test_views_share_the_storage(emu):
    x = torch.zeros(4, 4, device="emu")
    x.view(16)[3] = 7
    x.unfold(0, 2, 2)[0, 0, 0] = 5
    x.as_strided((2,), (5,), 5).fill_(1)
    assert x.cpu().flatten().tolist() == [5, 0, 0, 7, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]


def test_lazy_conjugates_are_resolved(emu):
    z = torch.complex(torch.randn(3, 4), torch.randn(3, 4))
    on_device = z.to("emu")
    assert torch.equal(on_device.conj().cpu(), z.conj())
    assert torch.equal(on_device.conj().t().clone().cpu(), z.conj().t())
    assert torch.equal((on_device.conj().imag + 1).cpu(), z.conj().imag + 1)


def test_out_arguments_are_resized(emu):
    out = torch.empty(0, device="emu")
    torch.add(torch.ones(3, device="emu"), 1, out=out)
    assert out.tolist() == [2, 2, 2]


def test_set_and_data_assignment(emu):
    a, b = torch.ones(3, device="emu"), torch.full((2,), 4.0, device="emu")
    a.data = b
    assert a.tolist() == [4, 4]
    c = torch.empty(0, device="emu").set_(b.untyped_storage(), 1, (1,), (1,))
    assert c.item() == 4


def test_host_tensors_do_not_mix_in(emu):
    x = torch.ones(3, device="emu")
    assert (x * torch.tensor(2.0)).sum().item() == 6
    assert x[torch.tensor([0, 1])].numel() == 2
    with pytest.raises(RuntimeError, match="to be on the same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="to be on the same device"):
        torch.cat([x, torch.ones(3)])


def test_bytes_are_exact(emu):
    base = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1001, dtype=torch.uint8, device="emu")
    assert torch.accelerator.memory_allocated() - base == 1001
    y = torch.empty(77, device="emu")
    assert torch.accelerator.memory_allocated() - base == 1001 + 308
    del x, y
    assert torch.accelerator.memory_allocated() == base
    assert torch.accelerator.max_memory_allocated() - base == 1001 + 308
    assert torch.accelerator.memory_stats()["allocation.all.current"] >= 0


def test_capacity_is_hard_and_exact(emu):
    gc.collect()
    base = torch.accelerator.memory_allocated()
    emu.configure(capacity=base + 4096)
    whole = torch.empty(4096, dtype=torch.uint8, device="emu")
    assert torch.accelerator.get_memory_info() == (0, base + 4096)
    with pytest.raises(torch.OutOfMemoryError, match="asked for 1 bytes"):
        torch.empty(1, dtype=torch.uint8, device="emu")
    del whole
    torch.empty(4096, dtype=torch.uint8, device="emu")


def test_a_step_fits_in_its_own_peak(emu):
    def step() -> None:
        layers = (torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        model = emu.to_device(torch.nn.Sequential(*layers))
        model(torch.randn(8, 64, device="emu")).sum().backward()

    step()
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    step()
    peak = torch.accelerator.max_memory_allocated()
    gc.collect()
    emu.configure(capacity=peak)
    step()
    gc.collect()
    emu.configure(capacity=peak - 1)
    with pytest.raises(torch.OutOfMemoryError):
        step()


def test_empty_cache_gives_memory_back(emu):
    x = torch.empty(32 << 20, dtype=torch.uint8, device="emu")
    held = torch.accelerator.memory_reserved()
    del x
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() <= held - (32 << 20)


@pytest.mark.parametrize("forever", [False, True])
def test_allocation_n_fails(emu, forever):
    emu.configure(fail_allocation=2, fail_forever=forever)
    kept = [torch.empty(4, device="emu") for _ in range(2)]
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        torch.empty(4, device="emu")
    if forever:
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            torch.empty(4, device="emu")
    else:
        kept.append(torch.empty(4, device="emu"))
    assert emu.allocations_made() == 4


def test_freed_and_fresh_memory_is_poisoned(emu):
    emu.configure(checker=False)
    x = torch.zeros(1024, device="emu")
    address = x.data_ptr()
    del x
    y = torch.empty(1024, device="emu")
    assert y.data_ptr() == address
    assert y.isnan().all().item()
    assert torch.empty(1 << 20, dtype=torch.bfloat16, device="emu").isnan().all().item()


def test_storage_release_and_refill(emu):
    x = torch.ones(256, device="emu")
    view = x[:128]
    base = torch.accelerator.memory_allocated()
    x.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated() == base - 1024
    assert view.shape == (128,)
    for use in (lambda: view + 1, lambda: view.sum(), lambda: x.copy_(torch.ones(256))):
        with pytest.raises(RuntimeError, match="released"):
            use()
    x.untyped_storage().resize_(1024)
    x.copy_(torch.full((256,), 3.0))
    assert view.sum().item() == 384
    x.untyped_storage().resize_(2048)
    assert view.sum().item() == 384


def test_refill_under_a_saved_view_gives_the_right_gradient(emu):
    weight = torch.randn(8, 8)
    on_device = weight.to("emu").requires_grad_()
    x = torch.randn(4, 8).to("emu").requires_grad_()
    y = (x @ on_device.t()).sum()
    with torch.autograd._unsafe_preserve_version_counter(on_device), torch.no_grad():
        on_device.untyped_storage().resize_(0)
        on_device.untyped_storage().resize_(256)
        on_device.copy_(weight)
    y.backward()
    assert torch.equal(x.grad.cpu(), torch.ones(4, 8) @ weight)


def test_pinned_memory(emu):
    before = emu.pinned_bytes()
    x = torch.empty(1000, pin_memory=True)
    assert x.is_pinned()
    assert x[3:].is_pinned()
    assert emu.pinned_bytes() - before == 4000
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()
    del x
    assert emu.pinned_bytes() == before
    torch.accelerator.empty_host_cache()


def test_registered_host_memory_counts_as_pinned(emu):
    x = torch.ones(1000)
    emu.host_register(x)
    assert x[10:].is_pinned()
    emu.host_unregister(x)
    assert not x.is_pinned()


def test_random_numbers_follow_the_host_generator(emu):
    torch.manual_seed(3)
    expected = (torch.randn(5), torch.nn.functional.dropout(torch.ones(64), 0.3))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert torch.equal(torch.randn(5, device="emu").cpu(), expected[0])
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64, device="emu"), 0.3).cpu(), expected[1])
    torch.set_rng_state(state)
    assert torch.equal(torch.randn(5, device="emu").cpu(), expected[0])
    generator = torch.Generator(device="emu").manual_seed(4)
    same = torch.Generator().manual_seed(4)
    assert torch.equal(
        torch.randn(5, device="emu", generator=generator).cpu(), torch.randn(5, generator=same)
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_with_the_same_dropout(emu, reentrant):
    x = torch.randn(16, 16).to("emu").requires_grad_()

    def block(t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(t.relu(), 0.5)

    torch.manual_seed(1)
    plain = block(x)
    plain.sum().backward()
    expected, x.grad = x.grad, None
    torch.manual_seed(1)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad.cpu(), expected.cpu())


def test_save_and_load(emu):
    x = torch.randn(4, 4).to("emu")
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location="cpu")
    assert torch.equal(loaded["x"], x.cpu())


def test_fake_tensors_plan_without_memory(emu):
    from torch._subclasses.fake_tensor import FakeTensorMode

    made = emu.allocations_made()
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 16, device="emu", requires_grad=True)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        torch.nn.functional.layer_norm(y, (16,)).sum().backward()
        assert q.grad.device.type == "emu"
    assert emu.allocations_made() == made


def test_an_out_of_memory_error_in_backward_is_raised(emu):
    x = torch.ones(1024, device="emu", requires_grad=True)
    y = (x * 2).exp().sum()
    emu.configure(capacity=torch.accelerator.memory_allocated() + 1024)
    with pytest.raises(torch.OutOfMemoryError):
        y.backward()


def test_the_build_is_cached_by_its_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _build.cache_root().parent == tmp_path
    key = _build.build_key()
    assert key == _build.build_key()
    copy = tmp_path / "csrc"
    shutil.copytree(_build.SOURCES, copy)
    monkeypatch.setattr(_build, "SOURCES", copy)
    assert _build.build_key() == key
    (copy / "clock.h").write_text("// changed")
    assert _build.build_key() != key


def _run(source: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_forked_child_is_refused_not_hung(emu):
    done = _run(
        "import os, torch\n"
        "from emulated import accelerator\n"
        "accelerator.configure()\n"
        "x = torch.ones(2, device='emu')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        torch.ones(2, device='emu')\n"
        "    except RuntimeError as error:\n"
        "        os._exit(7 if 'spawn' in str(error) else 1)\n"
        "    os._exit(2)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    assert done.returncode == 0, done.stderr


def test_loading_after_a_backward_pass_is_refused_clearly():
    done = _run(
        "import torch\n"
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "from emulated import accelerator\n"
        "accelerator.load()\n"
    )
    assert "call accelerator.load() before the first one" in done.stderr


def test_a_process_may_end_right_after_a_backward_pass():
    done = _run(
        "import torch\n"
        "from emulated import accelerator\n"
        "accelerator.configure()\n"
        "x = torch.ones(4, device='emu', requires_grad=True)\n"
        "(x * 2).sum().backward()\n"
    )
    assert done.returncode == 0, done.stderr


def test_the_host_cannot_touch_device_memory(emu):
    if not emu.is_protected():
        pytest.skip("this CPU has no protection keys")
    done = _run(
        "import ctypes, torch\n"
        "from emulated import accelerator\n"
        "accelerator.configure()\n"
        "x = torch.ones(2, device='emu')\n"
        "assert x.sum().item() == 2\n"
        "ctypes.c_float.from_address(x.data_ptr()).value\n"
    )
    assert done.returncode == -11


def test_without_the_checker_nothing_guards_device_memory(emu):
    if not emu.is_protected():
        pytest.skip("this CPU has no protection keys")
    done = _run(
        "import ctypes, torch\n"
        "from emulated import accelerator\n"
        "accelerator.configure(checker=False)\n"
        "x = torch.ones(2, device='emu')\n"
        "assert ctypes.c_float.from_address(x.data_ptr()).value == 1\n"
        "accelerator.configure()\n"
        "assert accelerator.is_protected()\n"
        "ctypes.c_float.from_address(x.data_ptr()).value\n"
    )
    assert done.returncode == -11, done.stderr
