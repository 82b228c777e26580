# SPDX-License-Identifier: Apache-2.0
"""The Llama network that is trained, in PyTorch.

The arithmetic is that of Hugging Face's `LlamaForCausalLM`: RMSNorm, rotary
positions that pair element i with i + head_dim/2, grouped-query attention,
SwiGLU, embedding tied to the output. Parameters carry Hugging Face's tensor
names, so that `Llama.tensors` can be written to a checkpoint as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults are those of `models/tales`."""

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 352
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 1024


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; x is [batch, heads, length, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide = shape.heads * shape.head_dim
        narrow = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = self.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(batch, length, heads, shape.head_dim).transpose(1, 2)

        q = rotate(split(self.q_proj(x), shape.heads), cos, sin)
        k = rotate(split(self.k_proj(x), shape.kv_heads), cos, sin)
        v = split(self.v_proj(x), shape.kv_heads)
        groups = shape.heads // shape.kv_heads
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(
            functional.silu(self.gate_proj(x)) * self.up_proj(x)
        )


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm = RmsNorm(size, eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(size, eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden_size, shape.norm_eps)
        half = torch.arange(0, shape.head_dim, 2).double() / shape.head_dim
        angles = torch.outer(
            torch.arange(shape.max_positions).double(), shape.rope_theta**-half
        )
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights; what writes to the residual stream starts small."""
        depth = (2 * self.shape.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            scale = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale *= depth
            nn.init.normal_(parameter, std=scale)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [batch, length] -> normed states [batch, length, hidden]."""
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embed_tokens.weight)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters under Hugging Face's names."""
        return {
            f"model.{name}": p.detach() for name, p in self.named_parameters()
        }
