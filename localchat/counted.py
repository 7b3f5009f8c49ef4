"""Numbers of things, as they are written."""


def counted(number: int, noun: str) -> str:
    """`number` and `noun`, which gets an s but for one: "1 token", "0 tokens", "1,024 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
