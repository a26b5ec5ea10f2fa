"""Speech for the scripts: words as chords of two tones, made on the spot, or a folder of WAV files with their texts."""

from __future__ import annotations

import csv
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, WhisperFeatureExtractor

from .console import UserError

RATE = 16_000  # samples per second
WORD_S = 0.4  # seconds
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# The keys of a telephone (ITU-T Q.23): each digit is a low and a high tone, in hertz.
LOW, HIGH = (697, 770, 852, 941), (1209, 1336, 1477)
TONES = [(LOW[3], HIGH[1]), *((low, high) for low in LOW[:3] for high in HIGH)]


@dataclass
class Recording:
    """One utterance: float32 samples at 16 kHz, and what is said."""

    samples: np.ndarray
    text: str


def spoken_digits(count: int, seed: int) -> list[Recording]:
    """Return `count` utterances of one to four digits, with noise."""
    draws = np.random.default_rng(seed)
    times = np.arange(int(RATE * WORD_S)) / RATE
    made = []
    for _ in range(count):
        digits = draws.integers(0, 10, draws.integers(1, 5))
        tones = [sum(np.sin(2 * np.pi * pitch * times) for pitch in TONES[digit]) for digit in digits]
        samples = 0.2 * np.concatenate(tones)
        samples += 0.02 * draws.standard_normal(len(samples))
        made.append(Recording(samples.astype(np.float32), " ".join(WORDS[digit] for digit in digits)))
    return made


def recordings(folder: str | Path) -> list[Recording]:
    """Load `folder/metadata.csv` (file_name, transcription) and the WAV files that it names (16 kHz, mono, 16 bits).

    Raises:
        UserError: a file is missing, or has another format.
    """
    table = Path(folder) / "metadata.csv"
    if not table.is_file():
        raise UserError(f"--dataset {str(folder)!r} has no metadata.csv with the columns file_name and transcription")
    found = []
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row.get("file_name") or row.get("transcription") is None:
                raise UserError(f"{str(table)!r} needs the columns file_name and transcription, found {list(row)}")
            try:
                with wave.open(str(table.parent / row["file_name"])) as sound:
                    kind = (sound.getframerate(), sound.getnchannels(), sound.getsampwidth())
                    data = sound.readframes(sound.getnframes())
            except (OSError, EOFError, wave.Error) as error:
                raise UserError(f"{row['file_name']!r} of {str(table)!r} could not be read: {error}") from error
            if kind != (RATE, 1, 2):
                raise UserError(
                    f"{row['file_name']!r}: expected 16000 Hz, 1 channel, 2 bytes, found {kind}; convert it"
                )
            found.append(Recording(np.frombuffer(data, np.int16).astype(np.float32) / 32768, row["transcription"]))
    return found


def features_of(
    spoken: Sequence[Recording], extractor: WhisperFeatureExtractor, tokenizer: PreTrainedTokenizerBase, length: int
) -> list[dict[str, Any]]:
    """Return rows for the Trainer: log-mel features of shape (mel bins, frames), and the text's tokens as labels."""
    rows = []
    for recording in spoken:
        features = extractor(recording.samples, sampling_rate=RATE, return_tensors="pt")["input_features"][0]
        labels = tokenizer(recording.text, truncation=True, max_length=length)["input_ids"]
        rows.append({"input_features": features, "labels": labels})
    return rows


@dataclass
class SpeechCollator:
    """Pads labels with the value that losses ignore; features already have one length."""

    model: Any

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        labels = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=-100
        )
        start = self.model.config.decoder_start_token_id
        filled = labels.masked_fill(labels < 0, self.model.config.pad_token_id)
        shifted = torch.cat([torch.full_like(filled[:, :1], start), filled[:, :-1]], dim=1)
        features = torch.stack([row["input_features"] for row in rows])
        return {"input_features": features, "labels": labels, "decoder_input_ids": shifted}
