"""How far logits are from a reference."""

import numpy as np


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Log-probabilities over the last axis, float64."""
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def mean_kl(reference: np.ndarray, logits: np.ndarray) -> float:
    """Mean over tokens of KL(reference, logits), in nats."""
    p, q = log_softmax(reference), log_softmax(logits)
    return float((np.exp(p) * (p - q)).sum(-1).mean())
