"""Make a corpus from a folder of text or code.

Every UTF-8 text file is a document. Copies, binary files and links are skipped and counted.
Documents with at most a fraction of the bytes, but at least one, are held out. A byte-level BPE
tokenizer is trained on the others, and all documents are written as shards of tokens. The same
files give the same bytes.

examples:
  sagesim pretrain prepare linux-6.1 corpus --only '**/*.[ch]' 'Documentation/**/*.rst'
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from sagesim.terminal import Failure, progress, stdout

HELP: Final = "make a corpus from a folder of text or code"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder of text or code")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder for the corpus")
    parser.add_argument(
        "--only",
        nargs="+",
        default=["**/*"],
        metavar="PATTERN",
        help="patterns of files to use, as in Python's Path.glob (default: all files)",
    )
    words = parser.add_mutually_exclusive_group()
    words.add_argument(
        "--vocabulary",
        type=int,
        default=16384,
        metavar="N",
        help="largest size of the new tokenizer (default: 16384)",
    )
    words.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json to use instead of a new tokenizer",
    )
    parser.add_argument(
        "--validation",
        type=float,
        default=0.01,
        metavar="X",
        help="largest fraction of the bytes to hold out (default: 0.01)",
    )
    parser.add_argument(
        "--source", default="", metavar="TEXT", help="description of the text, for the manifest"
    )


def run(args: argparse.Namespace) -> None:
    """Prepare the corpus and print its size."""
    from sagesim.experiments.pretrain.text.corpus import SPLITS
    from sagesim.experiments.pretrain.text.preparation import prepare

    if not args.folder.is_dir():
        raise Failure(f"{args.folder}: no such folder")
    try:
        with progress("tokenizing bytes") as bar:
            task = bar.add_task("")
            made = prepare(
                args.folder,
                args.out,
                vocabulary=args.vocabulary,
                tokenizer=args.tokenizer,
                patterns=args.only,
                validation=args.validation,
                source=args.source,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    # Path.glob raises NotImplementedError for absolute patterns.
    except (ValueError, NotImplementedError, OSError) as error:
        raise Failure(str(error)) from None
    console = stdout()
    total = sum(map(made.tokens, SPLITS))
    for split in SPLITS:
        tokens, documents = made.tokens(split), made.documents[split]
        share = f"{100 * tokens / total:.3g}% of all"
        console.print(f"{split}: {tokens} tokens of {documents} documents, {share}")
    console.print(f"{made.bytes / total:.2f} bytes per token, vocabulary of {made.vocabulary}")
    if made.skipped:
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(made.skipped.items()))
        console.print(f"files skipped: {skipped}")
    console.print(f"corpus {made.id} in {args.out}")
