"""Training on the device is bit-equal to training on the CPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.emulated

VOCABULARY = 160


class SmallConv(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(images).float(), labels)


def build(name: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, **ids)
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **ids,
        )
        return transformers.LlamaForCausalLM(config)
    if name == "bert":
        config = transformers.BertConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **ids
        )
        return transformers.BertForMaskedLM(config)
    return SmallConv()


def loss_of(model: torch.nn.Module, device: str, dtype: torch.dtype, step: int) -> torch.Tensor:
    torch.manual_seed(100 + step)
    if isinstance(model, SmallConv):
        images = torch.randn(4, 3, 16, 16).to(device, dtype)
        return model(images, torch.randint(0, 10, (4,)).to(device))
    tokens = torch.randint(0, VOCABULARY, (2, 24)).to(device)
    mask = torch.ones_like(tokens)
    mask[1, 20:] = 0
    return model(input_ids=tokens, attention_mask=mask, labels=tokens).loss


def train(
    emu, name: str, device: str, dtype: torch.dtype, fused: bool | None
) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = build(name).to(dtype).train()
    if device != "cpu":
        model = emu.to_device(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    losses = []
    for step in range(2):
        loss = loss_of(model, device, dtype, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [t.detach().cpu() for t in model.state_dict().values()]


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "conv"])
def test_training_is_bit_equal_to_the_cpu(emu, name, dtype, fused):
    losses, state = train(emu, name, "cpu", dtype, fused)
    emu_losses, emu_state = train(emu, name, "emu", dtype, fused)
    assert emu_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(emu_state, state, strict=True))


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_takes_the_cpu_path(emu, mask, dropout):
    def run(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 2, 8, 16).to(device).requires_grad_() for _ in range(3))
        bias = {"bool": torch.rand(8, 8) > 0.3, "float": torch.randn(8, 8)}.get(mask)
        if bias is not None:
            bias[:, 0] = True
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, None if bias is None else bias.to(device), dropout, is_causal=mask == "causal"
        )
        y.square().sum().backward()
        return y.detach().cpu(), q.grad.cpu()

    assert all(torch.equal(a, b) for a, b in zip(run("cpu"), run("emu"), strict=True))


def test_to_device_keeps_ties_and_parameters(emu):
    model = build("gpt2")
    before = list(model.parameters())
    model = emu.to_device(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
