"""A decoder of characters in a file: an ordinary safetensors file, with config and vocabulary as metadata.

`vitrail lab characters --save FILE` writes it, and `vitrail generate FILE "ROMEO:"` continues a text with it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError, FileError, InputError, printable
from vitrail.base.safe_files import parse_json
from vitrail.weights.bundle.bundle import check_suffix, not_finite
from vitrail.weights.readers.files import WeightFile, open_weights, write_safetensors

if TYPE_CHECKING:
    import torch

    from vitrail_course.decoder import Decoder, DecoderConfig

_KEY = "vitrail-characters"


@dataclass(frozen=True, eq=False)
class CharacterModel:
    """A decoder and the characters that its token ids stand for."""

    model: Decoder
    vocabulary: list[str]

    def save(self, path: str | Path) -> None:
        """Write the file, completely or not at all. An existing file is replaced."""
        check_suffix(path)
        description = {"config": asdict(self.model.config), "vocabulary": self.vocabulary}
        write_safetensors(path, self.model.state_dict(), {_KEY: json.dumps(description)})

    def continue_text(
        self, prompt: str, count: int, temperature: float = 0.8, seed: int | None = None
    ) -> str:
        """The prompt and `count` more characters; with the same seed, the same ones."""
        import torch

        from vitrail_course.decoder import generate

        rng = torch.Generator(next(self.model.parameters()).device)
        rng.seed() if seed is None else rng.manual_seed(seed)
        tokens = generate(self.model, self._encode(prompt), count, temperature=temperature, generator=rng)
        return "".join(self.vocabulary[number] for number in tokens[0].tolist())

    def _encode(self, prompt: str) -> torch.Tensor:
        import torch

        unknown = sorted(set(prompt) - set(self.vocabulary))
        if unknown or not prompt:
            reason = f"has {', '.join(map(repr, unknown[:5]))}" if unknown else "is empty"
            known = "".join(character for character in self.vocabulary if character.isprintable())
            raise InputError(
                f"The prompt {reason}; the model knows only the characters of its training text: "
                f"{printable(known, 200)}"
            )
        ids = [[self.vocabulary.index(character) for character in prompt]]
        return torch.tensor(ids, device=next(self.model.parameters()).device)


def load_character_model(path: str | Path) -> CharacterModel:
    """Read a file that `CharacterModel.save` wrote."""
    from vitrail_course.decoder import Decoder

    with open_weights(path) as file:
        config, vocabulary = _read_description(file)
        model = Decoder(config)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if expected != {name: entry.shape for name, entry in file.entries.items()}:
            raise _damaged(path, "its tensors are not those of its config")
        state = {name: file.tensor(name) for name in file.entries}
    if names := not_finite(state):
        raise _damaged(path, f"{names[0]} has NaN or infinity")
    model.load_state_dict(state)
    return CharacterModel(model.eval(), vocabulary)


def _read_description(file: WeightFile) -> tuple[DecoderConfig, list[str]]:
    from vitrail_course.decoder import DecoderConfig

    if _KEY not in file.metadata:
        raise FileError(
            f"{printable(file.path)} holds no model of characters; make one with `vitrail lab characters "
            "--save FILE`."
        )
    description = parse_json(file.metadata[_KEY], f"the description in {printable(file.path)}")
    match description:
        case {"config": dict(fields), "vocabulary": [*vocabulary]}:
            pass
        case _:
            raise _damaged(file.path, "it has no config or no vocabulary")
    try:
        config = DecoderConfig(**fields)
    except (ConfigError, TypeError) as error:
        raise _damaged(file.path, str(error).removesuffix(".")) from error
    characters: list[Any] = vocabulary
    valid = all(isinstance(one, str) and len(one) == 1 for one in characters)
    if not valid or len(set(characters)) != config.vocabulary:
        raise _damaged(file.path, f"its vocabulary is not {config.vocabulary} different characters")
    return config, characters


def _damaged(path: str | Path, reason: str) -> FileError:
    return FileError(
        f"The model of characters in {printable(path)} is damaged: {printable(reason)}. Save it again."
    )
