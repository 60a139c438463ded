"""Start a run from the command line, with its imports: torch, diffusers, transformers."""

from flowrl.cli.importing import collection_paused

with collection_paused():
    from flowrl.run.start import begun_before, finished_words, folder_state, resume, start

__all__ = ["begun_before", "finished_words", "folder_state", "resume", "start"]
