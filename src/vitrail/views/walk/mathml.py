"""The plain-text equations of a walk as MathML, which browsers typeset without a script or a font.

    as_mathml("A = softmax(q k^T / sqrt(d))")
    text_with_mathml("Block 0 turns z_0 into z_1.")

The grammar is that of the equations (`vitrail.views.walk`): sums of terms, terms of products and fractions,
products of factors; names with a prime, an index after `_` and an exponent after `^`.
"""

from __future__ import annotations

import re
from html import escape

_TOKEN = re.compile(
    r"\s*(\.\.\.|\d+(?:\.\d+)?(?:e-\d+)?|[A-Za-z]+'*(?:_(?:\w+|{[^}]*}))?|[-+*/^=()\[\]{};,])"
)
_NAME_IN_TEXT = re.compile(r"\b([A-Za-z]'*_\w+)")  # one letter with an index, such as z_0 or E_pos
_GREEK = {"mu": "μ", "var": "σ²", "lambda": "λ", "eps": "ε"}
_SIGNS = {"-": "−", "*": "⊙", "in": "∈", "...": "…", "x": "×"}


def as_mathml(equation: str) -> str:
    """The equation as MathML, with its plain text for readers without MathML."""
    return (
        f'<math xmlns="http://www.w3.org/1998/Math/MathML" displaystyle="true" alttext="{escape(equation)}">'
        f"<mrow>{_Typesetter(equation).typeset()}</mrow></math>"
    )


def text_with_mathml(text: str) -> str:
    """Prose as HTML, in which names such as z_0 are MathML."""
    parts = _NAME_IN_TEXT.split(text)  # every second one is a name
    return "".join(as_mathml(part) if n % 2 else escape(part) for n, part in enumerate(parts))


class _Typesetter:
    """A recursive descent over the tokens of one equation."""

    def __init__(self, equation: str) -> None:
        self.tokens: list[str] = _TOKEN.findall(equation)
        self.lists_of_sides = False  # within R^(...), where x is the sign of a product

    def typeset(self) -> str:
        parts = [self._sum()]
        while self.tokens:
            sign = self.tokens.pop(0)
            parts.append(_sign(sign))
            if self.tokens:
                parts.append(self._sum())
        return "".join(parts)

    def _next(self, *expected: str) -> bool:
        return bool(self.tokens) and self.tokens[0] in expected

    def _sum(self) -> str:
        parts = [self._term()]
        while self._next("+", "-", "in"):
            parts += [_sign(self.tokens.pop(0)), self._term()]
        return "".join(parts)

    def _term(self) -> str:
        left = self._product()
        while self._next("/", "*"):
            if self.tokens.pop(0) == "*":
                left = f"{left}{_sign('*')}{self._product()}"
            else:
                left = f"<mfrac><mrow>{left}</mrow><mrow>{self._product()}</mrow></mfrac>"
        return left

    def _product(self) -> str:
        factors = [self._factor()]
        while self.tokens and re.match(r"[\w(\[{]|\.\.\.", self.tokens[0]) and self.tokens[0] != "in":
            factors.append(self._factor())
        return '<mspace width="0.17em"/>'.join(factors)

    def _factor(self) -> str:
        token = self.tokens.pop(0)
        if token == "sqrt" and self._next("("):
            self.tokens.pop(0)
            inside = self._until(")")
            return self._raised(f"<msqrt><mrow>{inside}</mrow></msqrt>")
        if token in "([{":
            close = {"(": ")", "[": "]", "{": "}"}[token]
            inside = self._until(close)
            return self._raised(f"<mrow><mo>{token}</mo>{inside}<mo>{close}</mo></mrow>")
        if token == "...":
            return _sign(token)
        if token == "x" and self.lists_of_sides:
            return _sign(token)
        base = "<mi>ℝ</mi>" if token == "R" and self._next("^") else _name(token)
        is_function = token == "R" or len(token.partition("_")[0]) > 1
        for opening, close, applies in (("(", ")", is_function), ("[", "]", token.startswith("E"))):
            if applies and self._next(opening):
                self.tokens.pop(0)
                base = f"<mrow>{base}<mo>{opening}</mo>{self._until(close)}<mo>{close}</mo></mrow>"
        return self._raised(base)

    def _until(self, close: str) -> str:
        """What stands between brackets; separators keep their sign."""
        parts = [self._sum()]
        while not self._next(close):
            parts += [_sign(self.tokens.pop(0)), self._sum()]
        self.tokens.pop(0)
        return "".join(parts)

    def _raised(self, base: str) -> str:
        """Exponents: ^T is the transpose, ^t and numbers are rows, ^(3 x 4) the sides of a space."""
        while self._next("^"):
            self.tokens.pop(0)
            if self._next("("):
                self.tokens.pop(0)
                self.lists_of_sides = True
                raised = f"<mrow>{self._until(')')}</mrow>"
                self.lists_of_sides = False
            else:
                token = self.tokens.pop(0)
                raised = "<mo>⊤</mo>" if token == "T" else _name(token)
            base = _raise(base, raised)
        return base


def _raise(base: str, raised: str) -> str:
    """An exponent; over the index, if the base is a name with one, not to the right of it."""
    if base.startswith("<msub>"):
        return f"<msubsup>{base.removeprefix('<msub>').removesuffix('</msub>')}{raised}</msubsup>"
    return f"<msup>{base}{raised}</msup>"


def _sign(sign: str) -> str:
    return f"<mo>{_SIGNS.get(sign, escape(sign))}</mo>"


def _name(token: str) -> str:
    """A number, or a letter with primes and an index."""
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    letter, _, index = token.partition("_")
    index = index.strip("{}")
    primes = letter.count("'")
    letter = letter.rstrip("'")
    base = f"<mi>{_GREEK.get(letter, letter)}</mi>"
    prime = f"<mo>{'′' * primes}</mo>"
    if not index:
        return f"<msup>{base}{prime}</msup>" if primes else base
    below = f"<mn>{index}</mn>" if index.isdigit() else f"<mi>{index}</mi>"
    return f"<msubsup>{base}{below}{prime}</msubsup>" if primes else f"<msub>{base}{below}</msub>"
