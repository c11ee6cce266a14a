"""What users do between two steps, and within one, beside the plain loop."""

from __future__ import annotations

from pathlib import Path

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
    def script(run: Run) -> None:
        run.train(0)
        if run.engine is None:
            run.train(1)
        else:
            with outcore.gather(run.model):
                run.train(1)
        run.train(2)

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
