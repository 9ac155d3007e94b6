"""What is asked, and when: made from a seed, so that two servers get the same."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """A number of tokens: the same for all requests, or drawn evenly between two bounds."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From `128` or `64:512`. Raises `ValueError`."""
        low, _, high = text.partition(":")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.least <= lengths.most:
            raise ValueError(f"{text!r} is not a number of at least 1, nor two of them in order")
        return lengths

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.least, self.most)


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests of one kind."""

    input_tokens: Lengths
    output_tokens: Lengths
    num_prefix_tokens: int
    """With which every prompt begins, beside its own tokens."""
    vocab_size: int
    seed: int

    def asks(self, count: int, part: int) -> list[Ask]:
        """`count` requests; other ones for each `part`, but for their prefix."""
        common = random.Random(self.seed)
        prefix = [common.randrange(self.vocab_size) for _ in range(self.num_prefix_tokens)]
        own = random.Random(f"{self.seed}/{part}")
        return [
            Ask(
                prefix + [own.randrange(self.vocab_size) for _ in range(length)],
                self.output_tokens.draw(own),
            )
            for length in (self.input_tokens.draw(own) for _ in range(count))
        ]


@dataclass(frozen=True)
class Load:
    """How requests come: from clients that wait for each answer, or at a rate, come what may."""

    num_clients: int | None = None
    rate: float | None = None
    """Requests a second, at random (Poisson) times."""

    @property
    def name(self) -> str:
        return f"{self.num_clients} clients" if self.rate is None else f"{self.rate:g}/s"

    @property
    def level(self) -> float:
        return float(self.num_clients or 0) if self.rate is None else self.rate

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Seconds from the start to each request, of a load with a rate."""
        assert self.rate is not None
        generator, now, times = random.Random(seed), 0.0, []
        for _ in range(count):
            times.append(now)
            now += generator.expovariate(self.rate)
        return times
