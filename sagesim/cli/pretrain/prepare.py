"""Make a corpus of a folder of text or code.

Every file that is UTF-8 text is a document; copies, binaries and links are left out and counted.
A byte-level BPE is trained on the documents, the first of them by hash are held out, and all
become shards of tokens. The same files give the same bytes.

  sagesim pretrain prepare linux-6.1 corpus --only '**/*.[ch]' 'Documentation/**/*.rst'
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from sagesim.cli.terminal import Failure, progress, stdout

HELP: Final = "make a corpus of a folder of text or code"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of text or code")
    parser.add_argument("out", type=Path, metavar="OUT", help="the corpus, a new folder")
    parser.add_argument(
        "--only",
        nargs="+",
        default=["**/*"],
        metavar="PATTERN",
        help="which files, in the words of Python's glob (default: all)",
    )
    words = parser.add_mutually_exclusive_group()
    words.add_argument(
        "--vocabulary", type=int, default=16384, metavar="N", help="tokens (default: 16384)"
    )
    words.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json, instead of a new one"
    )
    parser.add_argument(
        "--validation",
        type=float,
        default=0.01,
        metavar="X",
        help="the fraction of bytes that is held out (default: 0.01)",
    )
    parser.add_argument(
        "--source", default="", metavar="TEXT", help="what the text is; kept with the corpus"
    )


def run(args: argparse.Namespace) -> None:
    """Prepare, and say what came of it."""
    from sagesim.experiments.pretrain.corpus import SPLITS
    from sagesim.experiments.pretrain.prepare import prepare

    if not args.folder.is_dir():
        raise Failure(f"{args.folder}: no such folder")
    try:
        with progress("bytes") as bar:
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
    except (ValueError, NotImplementedError) as error:  # glob refuses absolute patterns so
        raise Failure(str(error)) from None
    except OSError as error:
        raise Failure(str(error)) from None
    console = stdout()
    for split in SPLITS:
        console.print(f"{split}: {made.tokens(split)} tokens of {made.documents[split]} documents")
    console.print(
        f"{made.bytes / sum(map(made.tokens, SPLITS)):.2f} bytes a token, "
        f"vocabulary of {made.vocabulary}"
    )
    if made.skipped:
        left = ", ".join(f"{count} {reason}" for reason, count in sorted(made.skipped.items()))
        console.print(f"files left out: {left}")
    console.print(f"corpus {made.id} in {args.out}")
