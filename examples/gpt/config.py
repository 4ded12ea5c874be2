"""Sizes of the model and the settings of a run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """All that a run needs to know, apart from its precision, its seed and its text.

    Attributes:
        layers: number of transformer blocks.
        width: size of the residual stream.
        heads: attention heads; each has `width // heads` channels.
        context: tokens that the model sees at once.
        batch: sequences in a batch.
        vocab_size: number of tokens. They are bytes: above 256 only the embeddings get bigger.
        tie_embeddings: whether the head reuses the token embedding.
        steps: length of the run, and of the learning-rate schedule.
        learning_rate: the schedule's peak.
        b2: decay of Adam's second moment.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocab_size: int = 256
    tie_embeddings: bool = True
    steps: int = 100
    learning_rate: float = 1e-3
    b2: float = 0.95

    def __post_init__(self):
        """Refuse settings that cannot make a model."""
        positive = ("layers", "width", "heads", "context", "batch", "steps", "learning_rate")
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)}.")
        if self.width % self.heads:
            raise ValueError(
                f"`width` must be a multiple of `heads`, got {self.width}, {self.heads}."
            )
        if self.vocab_size < 256:
            raise ValueError(f"`vocab_size` must be at least 256 (bytes), got {self.vocab_size}.")
        if not 0.0 <= self.b2 < 1.0:
            raise ValueError(f"`b2` must be in [0, 1), got {self.b2}.")


SIZES = {
    "tiny": Config(layers=4, width=64, heads=4, context=64, batch=16, learning_rate=6e-3),
    "small": Config(layers=6, width=256, heads=8, context=128, batch=16),
    "medium": Config(layers=8, width=512, heads=8, context=256, batch=32, learning_rate=6e-4),
    # GPT-2's depth, context and vocabulary with an untied head, of a width that makes 168.1 million
    # parameters: 88.7 in the blocks, 39.4 in each of the two embeddings, 0.8 for the positions.
    "gpt2-168m": Config(
        layers=12,
        width=784,
        heads=14,
        context=1024,
        batch=16,
        vocab_size=50257,
        tie_embeddings=False,
        learning_rate=6e-4,
    ),
}


def get_size(name: str) -> Config:
    """Return the configuration called `name`.

    Raises:
        ValueError: for a name that is not in `SIZES`.
    """
    if name not in SIZES:
        raise ValueError(f"`size` must be one of {', '.join(SIZES)}, got {name!r}.")
    return SIZES[name]
