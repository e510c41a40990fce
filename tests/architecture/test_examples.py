"""What the README and the examples show runs, and prints what they say."""

from examples import readme


def test_the_example_of_the_readme(capsys):
    names = readme.main()
    printed = capsys.readouterr().out
    assert printed.startswith("(4, 128) xla: ")
    # Four tasks of `hidden` signal the one event that both tasks of `project` await.
    assert "event e0: t0..t3" in printed
    assert printed.count("wait e0>=4 resident") == 2
    x, step = names["x"], names["step"]
    arrays = [names[n] for n in ("gate", "up", "down")]
    assert step(x, *arrays).dtype == x.dtype
