"""A parser of the equations in a walk."""

import re

import torch


class Parser:
    """Evaluates the right side of an equation, given the values of its letters.

    sum = term {(+ | -) term};  term = product {(/ | *) product};  product = factor factor ...
    factor = (number | letter | function(sum, ...) | (sum) | [sum; ...]) {^ (T | t | number)}
    E[x] and E[0 ... 4] are rows of E, and are replaced first.
    """

    TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?(?:e-\d+)?|[A-Za-z_][\w']*|[-+*/^()\[\];,])")

    def __init__(self, text, letters, functions, join):
        self.letters, self.functions, self.join = letters, functions, join
        for number, name in enumerate(sorted((n for n in letters if "(" in n), key=len, reverse=True)):
            text = text.replace(name, f"value_{number}")  # LN(z_0) of an earlier stage is a letter itself
            self.letters = {**self.letters, f"value_{number}": letters[name]}
        text = re.sub(r"(\w+)\^(\d+)([,;]) \.\.\.[,;] \1\^(\d+)", r"rows(\1, \2, \4, '\3')", text)
        text = re.sub(r"rows\((\w+), (\d+), (\d+), '.'\)", self.replace_range, text)
        text = re.sub(r"(\w+)\[(\w+)(?: \.\.\. (\d+))?\]", self.replace_index, text)
        self.tokens = self.TOKEN.findall(text)
        assert "".join(self.tokens) == text.replace(" ", ""), text

    def replace_range(self, match):
        name = f"rows_{match[2]}_{match[3]}"
        self.letters = {**self.letters, name: self.letters[match[1]][int(match[2]) : int(match[3]) + 1]}
        return name

    def replace_index(self, match):
        table, first, last = match.groups()
        indices = (
            list(range(int(first), int(last or first) + 1)) if first[0].isdigit() else self.letters[first]
        )
        self.letters = {**self.letters, f"rows_of_{table}": self.letters[table][indices]}
        return f"rows_of_{table}"

    def evaluate(self):
        value = self.sum()
        assert not self.tokens, self.tokens
        return value

    def take(self, *expected):
        return self.tokens.pop(0) if self.tokens and self.tokens[0] in expected else None

    def sum(self):
        value = self.term()
        while sign := self.take("+", "-"):
            value = value + self.term() if sign == "+" else value - self.term()
        return value

    def term(self):
        value = self.product()
        while sign := self.take("/", "*"):
            value = value / self.product() if sign == "/" else value * self.product()
        return value

    def product(self):
        value = self.factor()
        while self.tokens and re.match(r"[\w(\[]", self.tokens[0]):
            other = self.factor()
            matrix = isinstance(value, torch.Tensor) and other.ndim == 2 and value.shape[-1] == len(other)
            value = value @ other if matrix else value * other
        return value

    def values(self, end, separator):
        values = [self.sum()]
        while self.take(separator):
            values.append(self.sum())
        assert self.take(end)
        return values

    def factor(self):
        token = self.tokens.pop(0)
        if token == "(":
            (value,) = self.values(")", ",")
        elif token == "[":
            value = self.join(self.values("]", ";"))
        elif token in self.functions and self.take("("):
            value = self.functions[token](*self.values(")", ","))
        else:
            value = float(token) if token[0].isdigit() else self.letters[token]
        while self.take("^"):
            exponent = self.tokens.pop(0)
            if exponent == "T":
                value = value.T
            elif exponent == "2" and not isinstance(value, dict):
                value = value**2
            else:
                value = value[self.letters["t"] if exponent == "t" else int(exponent)]
        return value
