"""Model families in plain JAX, and loading of their checkpoints.

Read one family file (`llama.py`, `gemma3.py`) to understand a model; `weights.py` loads
a Hugging Face folder, `registry.py` maps its `model_type` to the family.
"""
