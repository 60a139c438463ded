"""Sentences of the reader of preferences in the words of the door by which a table came.

They name the options of `flowrl evaluate-rewards`. A run has settings in their place; `flowrl vote`
and the votes of an earlier run have neither, so there the table itself is to be changed.
"""

_COLUMNS = "name them with --columns, such as prompt=caption,chosen=best,rejected=other"
_AS_TEXTS = ", or choose --layout texts to compare the words"
OF_A_RUN = {
    _COLUMNS: "name them with given.columns, such as "
    "{prompt: caption, chosen: best, rejected: other}",
    _AS_TEXTS: "",  # which would train no model of images
    "--layout": "given.layout",
    "--dimension": "given.label",
    "--images": "given.folder",
    "--columns": "given.columns",
}
OF_A_TABLE = {
    _COLUMNS: "rename them in the table",
    _AS_TEXTS: "",
    ", or choose another --layout": "",
    " (or to --images)": "",
}
