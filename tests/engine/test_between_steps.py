"""What users do between two steps, and within one, beside the plain loop."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

import outcore
from engine.twin import Run, assert_idle, floats, same, spread
from exact.shapes import Stack


def test_evaluation_between_steps(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            run.train(step)
            run.model.eval()
            with torch.no_grad():
                run.loss(50 + step)
                run.loss(60 + step, batch=5)
            with torch.inference_mode():
                run.loss(70)
            run.model.train()
        run.train(9)

    same(script, tmp_path)


def test_evaluation_before_the_first_step_and_with_gradients_on(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.model.eval()
        run.loss(1)  # a graph that nobody uses
        run.model.train()
        run.train(1, 2)

    same(script, tmp_path)


def test_inference_before_the_first_step(tmp_path: Path) -> None:
    """What is made under inference_mode can't be trained; the first opening of a unit happens there."""

    def script(run: Run) -> None:
        with torch.inference_mode():
            run.loss(1)
        run.train(1)
        with torch.inference_mode():
            run.loss(2, batch=9)
        run.train(2)

    same(script, tmp_path, tight="4MiB")


def test_growing_inputs(tmp_path: Path) -> None:
    """As a generation without a cache does: each forward is longer than all before."""

    def script(run: Run) -> None:
        run.train(0)
        with torch.no_grad():
            for length in range(1, 20):
                run.loss(length, batch=1, length=length)
        run.train(1)

    same(script, tmp_path)


def test_batches_of_other_shapes(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step, batch in enumerate((3, 1, 7, 2, 11, 11, 1)):
            run.train(step, batch=batch)

    same(script, tmp_path, tight="4MiB")


def test_a_dropped_loss(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.train(0)
        run.loss(1)
        kept = run.loss(2)
        run.train(3)
        del kept
        run.train(4)

    same(script, tmp_path, tight="4MiB")


@pytest.mark.parametrize("reverse", [False, True])
def test_two_forwards_then_two_backwards(reverse: bool, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            losses = [run.loss(10 * step), run.loss(10 * step + 1)]
            for loss in reversed(losses) if reverse else losses:
                loss.backward()
            run.step()

    same(script, tmp_path, tight="4MiB")


def test_an_evaluation_between_forward_and_backward(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            loss = run.loss(step)
            with torch.no_grad():
                run.loss(20 + step)
            loss.backward()
            run.step()

    same(script, tmp_path, tight="4MiB")


def test_one_backward_of_two_forwards(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            (run.loss(step) + 2 * run.loss(30 + step)).backward()
            run.step()

    same(script, tmp_path, tight="4MiB")


def test_backward_twice(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            loss = run.loss(step)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=step == 1)
            run.step()

    same(script, tmp_path)


def test_gradients_of_the_inputs(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(2):
            x = run.cast(floats(step)).requires_grad_()
            loss = run.model(x).float().square().mean()
            (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
            run.log.append(grad.float().sum().item())
            loss.backward(inputs=[x], retain_graph=True)
            loss.backward()
            run.log.append(x.grad.float().sum().item())  # type: ignore[union-attr]
            run.step()

    same(script, tmp_path)


def test_a_graph_through_the_gradient_is_refused(tmp_path: Path) -> None:
    """A gradient penalty reads the parameters in nodes that backward itself made."""
    budget = outcore.Budget(host="3MiB", disk=tmp_path)
    with spread(budget=budget) as run:
        x = run.cast(floats(0)).requires_grad_()
        loss = run.model(x).float().square().mean()
        with pytest.raises(outcore.errors.StateError, match="create_graph"):
            torch.autograd.grad(loss, x, create_graph=True)
        run.train(1)


def test_gather_between_steps(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            run.train(step)
            if run.engine is None:
                state = run.model.state_dict()
            else:
                with outcore.gather(run.model):
                    state = {k: v.clone() for k, v in run.model.state_dict().items()}
            run.log.append([value.float().sum().item() for value in state.values()])

    same(script, tmp_path)


def test_training_inside_gather(tmp_path: Path) -> None:
    """Each step there is seen by the next forward, and by who reads."""

    def script(run: Run) -> None:
        run.train(0)
        with nullcontext() if run.engine is None else outcore.gather(run.model):
            run.train(1, 2)
            run.log.append([p.float().sum().item() for p in run.model.parameters()])
            run.train(3)
        run.train(4)

    same(script, tmp_path)


@pytest.mark.emulated
def test_training_inside_gather_of_a_device(tmp_path: Path, emu: ModuleType) -> None:
    """The frames that are open there hold the parameters as the last step left them."""
    losses = []
    for inside in (False, True):
        budget = outcore.Budget(device="64MiB", host="64MiB")
        with (
            spread(budget=budget, device=emu.NAME) as run,
            outcore.gather(run.model) if inside else nullcontext(),
        ):
            for step in range(3):
                loss = run.model(floats(step).to(emu.NAME)).float().square().mean()
                run.optimizer.backward(loss)
                run.step()
                losses.append(loss.item())
    assert losses[:3] == losses[3:]


def test_a_rate_in_a_tensor_is_taken_at_the_call(tmp_path: Path) -> None:
    """As `torch.optim.lr_scheduler` does, which changes it in place."""

    def script(run: Run) -> None:
        rate = torch.tensor(1e-2)
        run.optimizer.param_groups[0]["lr"] = rate
        for step in range(4):
            run.train(step)
            rate.mul_(0.1)
        run.train(9)

    same(script, tmp_path)


def test_backward_of_what_a_step_has_changed_is_refused(tmp_path: Path) -> None:
    """torch says so, too, of a graph whose parameters changed in place."""
    with spread(budget=outcore.Budget(host="4MiB", disk=tmp_path)) as run:
        first, second = run.loss(0), run.loss(1)
        run.optimizer.backward(first)
        run.step()
        with pytest.raises(outcore.errors.StateError, match="was changed since this forward"):
            run.optimizer.backward(second)
        run.optimizer.zero_grad()
        run.train(2, 3)
        assert run.engine is not None
        assert_idle(run.engine)


def test_a_backward_that_a_step_left_alone_goes_on(tmp_path: Path) -> None:
    """Only what had a gradient is changed."""

    def script(run: Run) -> None:
        x = run.cast(floats(0) @ torch.ones(32, 160) / 9).requires_grad_()
        first = run.model.blocks[0](x).float().square().mean()
        second = run.model.blocks[1](x).float().square().mean()
        first.backward()
        run.step()
        second.backward()
        run.step()
        run.log += [first.item(), second.item()]
        run.train(1)

    same(script, tmp_path)


def test_gather_that_does_not_fit_leaves_the_model_usable(tmp_path: Path) -> None:
    budget = outcore.Budget(host="3MiB", disk=tmp_path)
    with spread(_wide, budget=budget) as run:
        run.train(0)
        with pytest.raises(outcore.errors.BudgetError), outcore.gather(run.model):
            pass
        run.train(1)
        assert run.engine is not None
        assert_idle(run.engine)


def _wide() -> Stack:
    return Stack(16)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_called_directly(recompute: bool, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.train(0)
        for step in range(2):
            x = run.cast(floats(step, length=5) @ torch.ones(32, 160) / 9)
            loss = run.model.blocks[1](run.model.blocks[0](x)).float().square().mean()
            loss.backward()
            run.log.append(loss.item())
            run.step()
        run.train(1)

    activations = outcore.Activations("recompute" if recompute else "keep")
    same(script, tmp_path, activations=activations)
