"""`dragoman nearest` and `augment`: text to train on."""

from pathlib import Path
from typing import Annotated

import typer

from dragoman.model.errors import InputError

app = typer.Typer()


@app.command()
def nearest(
    candidates: Annotated[list[Path], typer.Argument(metavar="CANDIDATES", help="Equally many lines for each reference.")],
    reference: Annotated[Path, typer.Option(help="One sentence a line.")],
    output: Annotated[Path, typer.Option(help="Text to write, gzipped where its name ends in .gz.")],
) -> None:
    """Write the candidate of each reference that is nearest to it, by sentence BLEU: text to train a model on."""
    from dragoman.model.corpus import read_lines, write_lines
    from dragoman.model.files import refuse_unwritable
    from dragoman.model.nearest import choose_nearest

    refuse_unwritable(output)
    chosen = choose_nearest(read_lines(reference), {str(path): read_lines(path) for path in candidates})
    write_lines(output, chosen)
    typer.echo(f"wrote {output}: {len(chosen)} lines")


@app.command()
def augment(
    source: Annotated[Path, typer.Option(help="Text to make more of, one sentence a line.")],
    target: Annotated[Path, typer.Option(help="Its translation, line by line.")],
    source_language: Annotated[str, typer.Option(help="Language of the source, such as en.")],
    target_language: Annotated[str, typer.Option(help="Language of the target, such as de.")],
    output_source: Annotated[Path, typer.Option(help="Text to write, gzipped where its name ends in .gz.")],
    output_target: Annotated[Path, typer.Option(help="Its translation.")],
    copies: Annotated[int, typer.Option(min=0, help="How often each sentence with a noun phrase is changed.")] = 6,
    phrases: Annotated[int, typer.Option(min=0, help="Short phrases around each very rare word.")] = 12,
    seed: Annotated[int, typer.Option(help="Of what is drawn here; the aligner draws with its own.")] = 1,
    aligner: Annotated[str, typer.Option(help="The program eflomal-align: name or path.")] = "eflomal-align",
) -> None:
    """Write more parallel text for rare words: sentences with other sentences' phrases, and phrases by themselves."""
    from dragoman.model.augment import Augmenter, determiners_of
    from dragoman.model.corpus import read_parallel, write_lines
    from dragoman.model.files import refuse_unwritable
    from dragoman.model.phrases import align

    if len({path.resolve() for path in (source, target, output_source, output_target)}) < 4:
        raise InputError("source, target, --output-source and --output-target must be four files")
    for path in (output_source, output_target):
        refuse_unwritable(path)
    determiners = determiners_of(source_language), determiners_of(target_language)
    augmenter = Augmenter(align(*read_parallel(source, target), aligner), determiners, seed)
    sentences, short = augmenter.substituted(copies), augmenter.short(phrases)
    if not sentences and not short:
        raise InputError(f"nothing can be made of {source} and {target}: too little text, or no linked phrases in it")
    write_lines(output_source, [text for text, _ in (*sentences, *short)])
    write_lines(output_target, [text for _, text in (*sentences, *short)])
    typer.echo(f"wrote {output_source} and {output_target}: {len(sentences)} sentences, {len(short)} phrases")
