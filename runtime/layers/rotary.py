"""Rotary position embedding: frequencies for each kind of scaling, and the rotation.

Shapes: T tokens of the batch, N heads, E head size.
"""

import math

import torch
from torch import nn

from vcli.topology.errors import ConfigError
from vcli.topology.model_spec import RopeSpec


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions. One for all layers: `cos_sin` is computed once per step."""

    inverse_frequencies: torch.Tensor

    def __init__(
        self,
        rope: RopeSpec,
        *,
        head_size: int,
        max_position_embeddings: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        frequencies, self.amplitude = inverse_frequencies(rope, head_size, max_position_embeddings)
        # In float32 always: positions beyond 256 have no bfloat16.
        self.register_buffer("inverse_frequencies", frequencies.to(device), persistent=False)
        self._table_PE: torch.Tensor | None = None

    def table(self, num_positions: int) -> torch.Tensor:
        """Cosines, then sines, (positions, E) float32; made once."""
        if self._table_PE is None or len(self._table_PE) < num_positions:
            device = self.inverse_frequencies.device
            positions = torch.arange(num_positions, device=device)
            cos, sin = self.cos_sin(positions, torch.float32)
            self._table_PE = torch.cat((cos, sin), dim=-1).squeeze(1).contiguous()
        return self._table_PE

    def cos_sin(
        self, positions_T: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (T, 1, E/2) in `dtype`, for `rotate`."""
        angles = positions_T[:, None, None].float() * self.inverse_frequencies
        cos, sin = angles.cos() * self.amplitude, angles.sin() * self.amplitude
        return cos.to(dtype), sin.to(dtype)


def rotate(x_TNE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads turned by their positions; element i is paired with element i + E/2."""
    first, second = x_TNE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(
    rope: RopeSpec, head_size: int, max_position_embeddings: int
) -> tuple[torch.Tensor, float]:
    """Radians per position (E/2, float32), and the factor on cosines and sines.

    Raises:
        ConfigError: unknown kind, or a parameter of the scaling is missing.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / _required(rope, "factor"), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain, max_position_embeddings), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, max_position_embeddings)
    raise ConfigError(f"rope_type {rope.kind!r} is not supported")


def _llama3(rope: RopeSpec, plain: torch.Tensor, max_position_embeddings: int) -> torch.Tensor:
    """Long waves slowed down by `factor`, short ones kept, a linear passage between them."""
    factor = _required(rope, "factor")
    low, high = _required(rope, "low_freq_factor"), _required(rope, "high_freq_factor")
    trained_context = _trained_context(rope, max_position_embeddings)
    wavelengths = 2 * math.pi / plain
    kept_share = (trained_context / wavelengths - low) / (high - low)
    passage = (1 - kept_share) * plain / factor + kept_share * plain
    slowed = torch.where(wavelengths > trained_context / low, plain / factor, passage)
    return torch.where(wavelengths < trained_context / high, plain, slowed)


def _yarn(
    rope: RopeSpec, plain: torch.Tensor, max_position_embeddings: int
) -> tuple[torch.Tensor, float]:
    """Frequencies kept or slowed down by how often they turn within the trained context."""
    trained_context = _trained_context(rope, max_position_embeddings)
    factor = rope.parameter("factor") or max_position_embeddings / trained_context
    half = plain.numel()
    head_size = 2 * half

    def index_that_turns(times: float) -> float:
        position_ratio = trained_context / (times * 2 * math.pi)
        return head_size * math.log(position_ratio) / (2 * math.log(rope.theta))

    low = index_that_turns(rope.parameter("beta_fast") or 32.0)
    high = index_that_turns(rope.parameter("beta_slow") or 1.0)
    if rope.parameter("truncate") != 0.0:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_share = 1 - ramp
    frequencies = plain / factor * (1 - kept_share) + plain * kept_share
    return frequencies, _yarn_amplitude(rope, factor)


def _yarn_amplitude(rope: RopeSpec, factor: float) -> float:
    given = rope.parameter("attention_factor")
    if given is not None:
        return given

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = rope.parameter("mscale"), rope.parameter("mscale_all_dim")
    if numerator and denominator:
        return growth(numerator) / growth(denominator)
    return growth(1.0)


def _trained_context(rope: RopeSpec, max_position_embeddings: int) -> float:
    return rope.parameter("original_max_position_embeddings") or float(max_position_embeddings)


def _required(rope: RopeSpec, name: str) -> float:
    value = rope.parameter(name)
    if value is None:
        raise ConfigError(
            f"rope_type {rope.kind!r} needs {name!r}", hint="add it to rope_scaling in config.json"
        )
    return value
