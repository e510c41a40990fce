"""Run the example of README.md, and print the task graph that was derived from it."""

from pathlib import Path
from typing import Any


def main() -> dict[str, Any]:
    """Run the first Python block of the README; returns its names."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = text.split("```python\n", 1)[1].split("```", 1)[0]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    arrays = [names[n] for n in ("x", "gate", "up", "down")]
    lowered = names["step"].lower(*arrays, implementation="simulate")
    print(lowered.as_text("events"))
    return names


if __name__ == "__main__":
    main()
