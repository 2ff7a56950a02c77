"""Commands and snippets, as support/pages.py takes them from Markdown."""

from support.pages import snippets

PAGE = """\
# A page

    $ isopref data my.yaml   # a comment
    what it prints

Use `isopref plan my.yaml
--card H100`, not `isopref plan` or `optim.lr`.

```yaml
model: {path: m}
data: {train: d}
```

    make install && source .venv/bin/activate

    torchrun --nnodes 2 \\
        -m isopref train my.yaml

then

    optim: {lr: 1e-6}

and

    l = -log sigmoid(beta * m)

```bash
# a comment
isopref ls
```

```python
isopref.train("my.yaml")
```

```python
isopref.train(
    config: str,
)
```

    {"prompt": "a",
     "chosen": "b"}

or

    a -- b
"""


def test_snippets_in_order() -> None:
    found = snippets("page.md", PAGE)
    assert [(one.place.removeprefix("page.md:"), one.kind, one.line) for one in found] == [
        ("3", "command", "isopref data my.yaml"),
        ("6", "command", "isopref plan my.yaml --card H100"),
        ("10", "yaml", "model: {path: m} data: {train: d}"),
        ("14", "command", "make install"),
        ("14", "command", "source .venv/bin/activate"),
        ("16", "command", "torchrun --nnodes 2 -m isopref train my.yaml"),
        ("21", "yaml", "optim: {lr: 1e-6}"),
        ("29", "command", "isopref ls"),
        ("33", "python", 'isopref.train("my.yaml")'),
        ("37", "signature", "isopref.train( config: str, )"),
        ("42", "json", '{"prompt": "a", "chosen": "b"}'),
        ("47", "text", "a -- b"),
    ]
    assert [one.inline for one in found].count(True) == 1
    assert [one.config is None for one in found].count(True) == 3


def test_a_config_is_that_of_the_commands_after_it() -> None:
    whole, part = "model: {path: m}\ndata: {train: d}\n", "optim: {lr: 1e-6}\n"
    text = f"```yaml\n{whole}```\n\n```yaml\n{part}```\n\n    isopref train my.yaml\n"
    assert [one.config for one in snippets("page.md", text)] == [None, whole, whole]
