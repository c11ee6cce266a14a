"""The split master: nothing is lost, and no bit differs from the full one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.kernel_cases import RULES, State, assert_same, bits
from outcore.errors import UsageError
from outcore.optim.kernels import AdamRule, GradTransform, Master, SGDRule, join_master, split_master
from outcore.optim.kernels.master import quiet, with_carry

WORDS = [
    0x00000000, 0x80000000,  # zeros
    0x00000001, 0x80000001, 0x00008000, 0x00007FFF, 0x00008001, 0x007FFFFF,  # denormals, some of them ties
    0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000,  # ties to even, down and up
    0x3F807FFF, 0x3F808001, 0x3FFFFFFF, 0x3FFF8000,  # beside ties; carries into the exponent
    0x7F7FFFFF, 0x7F7F8000, 0xFF7FFFFF, 0x7F7F7FFF,  # rounds to inf, or just not
    0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF,  # inf and NaN
]  # fmt: skip

words = st.one_of(
    st.sampled_from(WORDS),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 0xFFFF).map(lambda upper: upper << 16 | 0x8000),
)
halfwords = st.one_of(st.sampled_from([0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 1, 0x8001]), st.integers(0, 0xFFFF))
rates = st.sampled_from([1e-8, 1e-4, 1e-2, 1.0, 1e30])


def from_words(numbers: list[int]) -> torch.Tensor:
    signed = [number - (1 << 32 if number >> 31 else 0) for number in numbers]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def bf16(numbers: list[int]) -> torch.Tensor:
    signed = [number - (1 << 16 if number >> 15 else 0) for number in numbers]
    return torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16)


@settings(max_examples=200, deadline=None)
@given(st.lists(words, min_size=1, max_size=50))
def test_split_and_join_are_inverse(numbers: list[int]) -> None:
    master = from_words(numbers)
    param, low, carry = split_master(master)
    second = with_carry(torch.full_like(master, 0.25), carry)
    assert torch.equal(bits(join_master(param, low, second)), bits(quiet(master)))
    assert torch.equal(second.abs(), torch.full_like(master, 0.25))


@settings(max_examples=200, deadline=None)
@given(st.lists(words, min_size=1, max_size=50))
def test_parameter_is_rounded_as_by_torch(numbers: list[int]) -> None:
    master = from_words(numbers)
    param, _, _ = split_master(master)
    theirs = master.to(torch.bfloat16)
    finite = ~master.isnan()
    assert torch.equal(bits(param)[finite], bits(theirs)[finite])
    # which NaN torch makes depends on the machine's vector instructions
    assert bool((bits(param)[~finite] == 0x7FC0).all())
    assert bool(theirs[~finite].isnan().all())


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["adamw", "adam", "adagrad"]),
    data=st.lists(st.tuples(words, st.tuples(halfwords, halfwords, halfwords)), min_size=1, max_size=80),
    lr=rates,
    transform=st.sampled_from([GradTransform(), GradTransform(0.5, 2.0, -1.0)]),
)
def test_split_and_full_agree_bit_by_bit(
    name: str, data: list[tuple[int, tuple[int, int, int]]], lr: float, transform: GradTransform
) -> None:
    rule, hyper = RULES[name]
    hyper = {**hyper, "lr": lr}
    values = from_words([word for word, _ in data])
    split = State.new(rule, values, torch.bfloat16, Master.SPLIT)
    full = State.new(rule, values, torch.bfloat16, Master.FULL)
    assert_same(split.read(rule), full.read(rule))
    for step in range(1, 10):
        grad = bf16([halves[step % 3] for _, halves in data])
        for state in (split, full):
            rule.update(state.param, grad, state.planes, hyper, step, transform)
        assert_same(split.read(rule), full.read(rule))


def test_split_and_full_agree_over_many_steps() -> None:
    rule, _ = RULES["adamw"]
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5_003, generator=generator)
    values[:1000] = from_words([(0x3F80 + k) << 16 | 0x8000 for k in range(1000)])
    split = State.new(rule, values, torch.bfloat16, Master.SPLIT)
    full = State.new(rule, values, torch.bfloat16, Master.FULL)
    for step in range(1, 201):
        grad = torch.randn(5_003, generator=generator).to(torch.bfloat16)
        split.step("adamw", grad, step)
        full.step("adamw", grad, step)
    assert_same(split.read(rule), full.read(rule))


def test_masters_and_moments_can_be_set_apart() -> None:
    rule = AdamRule()
    values = from_words(WORDS)
    state = State.new(rule, torch.zeros(len(WORDS)), torch.bfloat16, Master.SPLIT)
    moments = {name: torch.arange(len(WORDS), dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    rule.set_moments(state.planes, moments)
    rule.set_master(state.param, state.planes, values)
    rule.set_moments(state.planes, moments)
    seen = state.read(rule)
    assert torch.equal(seen["master"], bits(quiet(values)))
    for name, moment in moments.items():
        assert torch.equal(seen[name], bits(moment))


def test_moments_are_copies() -> None:
    rule = AdamRule()
    state = State.new(rule, torch.ones(3), torch.bfloat16, Master.SPLIT)
    rule.moments(state.planes)["exp_avg"].fill_(7)
    assert bool((rule.moments(state.planes)["exp_avg"] == 0).all())


@pytest.mark.parametrize(
    ("dtype", "master"),
    [
        (torch.bfloat16, Master.NONE),
        (torch.float32, Master.FULL),
        (torch.float16, Master.SPLIT),
        (torch.float32, Master.SPLIT),
    ],
    ids=str,
)
def test_masters_that_cannot_be(dtype: torch.dtype, master: Master) -> None:
    with pytest.raises(UsageError, match="can't keep the master"):
        AdamRule().planes(dtype, master)


def test_rules_without_a_second_moment_can_not_split() -> None:
    with pytest.raises(UsageError, match="can't keep the master"):
        SGDRule(momentum=True).planes(torch.bfloat16, Master.SPLIT)
