"""Named real shapes, shared by the benchmarks and their tests.

Sizes are those of the published config.json of each model; a program that loads a
checkpoint reads them from the checkpoint instead.
"""

from dataclasses import dataclass

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Sizes of a decoder-only transformer of the Llama family (Qwen3: `qk_norm`)."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    rms_eps: float
    tied: bool
    qk_norm: bool = False
    rope_scaling: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads=} is no multiple of {self.kv_heads=}")
        if self.head_dim % 2:
            raise ValueError(f"{self.head_dim=} must be even: RoPE rotates halves")

    @property
    def qkv_rows(self) -> int:
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """Bytes of bf16 weights that one decode step reads, whatever the batch.

        Rows of an untied embedding are not counted: a step reads one per token.
        """
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        layer = (
            self.hidden * self.qkv_rows
            + self.q_heads * self.head_dim * self.hidden
            + 3 * self.hidden * self.intermediate
            + norms
        )
        head = self.vocab * self.hidden + self.hidden
        return BF16_BYTES * (self.layers * layer + head)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of bf16 keys and values of one position, all layers."""
        return BF16_BYTES * 2 * self.layers * self.kv_heads * self.head_dim

    def step_bytes(self, batch: int, context: int, steps: int) -> int:
        """Mean bytes that a step must read in a loop that starts at `context`.

        Step i reads the weights once and `context + i` cached positions of each row.
        """
        mean_positions = context + (steps - 1) / 2
        return self.weight_bytes + round(
            batch * mean_positions * self.kv_bytes_per_token
        )


LLAMA_3_2_1B = DecodeShape(
    name="llama-3.2-1b",
    layers=16,
    hidden=2048,
    intermediate=8192,
    q_heads=32,
    kv_heads=8,
    head_dim=64,
    vocab=128256,
    rope_theta=5e5,
    rms_eps=1e-5,
    tied=True,
    rope_scaling=Llama3Scaling(factor=32.0),
)
LLAMA_3_2_3B = DecodeShape(
    name="llama-3.2-3b",
    layers=28,
    hidden=3072,
    intermediate=8192,
    q_heads=24,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    rope_theta=5e5,
    rms_eps=1e-5,
    tied=True,
    rope_scaling=Llama3Scaling(factor=32.0),
)
LLAMA_3_1_8B = DecodeShape(
    name="llama-3.1-8b",
    layers=32,
    hidden=4096,
    intermediate=14336,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    rope_theta=5e5,
    rms_eps=1e-5,
    tied=False,
    rope_scaling=Llama3Scaling(factor=8.0),
)
QWEN3_0_6B = DecodeShape(
    name="qwen3-0.6b",
    layers=28,
    hidden=1024,
    intermediate=3072,
    q_heads=16,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    rope_theta=1e6,
    rms_eps=1e-6,
    tied=True,
    qk_norm=True,
)
QWEN3_8B = DecodeShape(
    name="qwen3-8b",
    layers=36,
    hidden=4096,
    intermediate=12288,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    rope_theta=1e6,
    rms_eps=1e-6,
    tied=False,
    qk_norm=True,
)
# Small enough for a CPU; no size is a power of two that would hide a mistake.
TINY = DecodeShape(
    name="tiny",
    layers=2,
    hidden=96,
    intermediate=160,
    q_heads=6,
    kv_heads=2,
    head_dim=16,
    vocab=311,
    rope_theta=5e5,
    rms_eps=1e-5,
    tied=True,
    rope_scaling=Llama3Scaling(factor=8.0, original_positions=32),
)

SHAPES = {
    shape.name: shape
    for shape in (LLAMA_3_2_1B, LLAMA_3_2_3B, LLAMA_3_1_8B, QWEN3_0_6B, QWEN3_8B, TINY)
}
