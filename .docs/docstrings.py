"""How docstrings become Markdown: they are plain text, with doctests, lists and shapes that Markdown would misread.

An extension of griffe, which reads the library without importing it. Public names move to where they are imported
from: `logchain.product` is the function, not the file that it stands in.
"""

import re
from typing import Any

import griffe

SECTION = re.compile(r"(Args|Attributes|Raises|Returns):$")
NOTE = re.compile(r"(Cost|Source|Definitions?)([^:`]*):")
ITEM = re.compile(r" {4}(\w+): ")
PAIR = re.compile(r"(\s+)(\w+), (\w+)(?=: )")
# [*B, v, c], of which Markdown would make emphasis
SHAPE = re.compile(r"\[[*.\w][\w*., +-]*\]")
NAME = re.compile(r"`(logchain\.[\w.]*\w)`")


class Docstrings(griffe.Extension):
    """Public names where they are imported from, with docstrings in Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Move and rewrite what was loaded."""
        public = [(module, name) for module in (pkg, pkg["nn"], pkg["distributed"]) for name in module.exports or ()]
        objects = [(module, name, target(module, name)) for module, name in public]
        for module, name, obj in objects:
            if not obj.is_module:
                # `logchain.viterbi` is the function, and `logchain.viterbi.Path` what stands in its file
                if obj.is_function:
                    obj.members.update(classes(obj.parent))
                obj.parent = module
                module.members[name] = obj
        seen: set[int] = set()
        for _, _, obj in objects:
            rewrite(obj, seen)
        rewrite(pkg["stream"], seen)


def target(module: griffe.Module, name: str) -> Any:
    """The object of a public name: a file of the same name hides it."""
    obj: Any = module.members[name]
    if obj.is_alias:
        return obj.final_target
    return obj.members.get(name, obj) if obj.is_module else obj


def classes(module: griffe.Module) -> dict[str, Any]:
    """The types of arguments and results, which the file of a public function has or imports."""
    types = {name: member for name, member in module.members.items() if name[0].isupper()}
    return {name: member for name, member in types.items() if member.is_alias or member.is_class}


def rewrite(obj: Any, seen: set[int]) -> None:
    """The docstrings of an object and of what it has, once each."""
    if obj.is_alias or id(obj) in seen:
        return
    seen.add(id(obj))
    if obj.docstring:
        obj.docstring.value = markdown(obj.docstring.value)
    for parameter in obj.parameters if obj.is_function else ():
        # griffe takes () as the default of what may be given any number of times
        if parameter.kind in (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword):
            parameter.default = None
    for member in obj.members.values():
        rewrite(member, seen)


def markdown(text: str) -> str:
    """A docstring as Markdown, in which griffe finds its sections."""
    lines: list[str] = []
    returns = section = doctest = item = False
    for line in text.splitlines():
        bare, before = line.strip(), lines[-1] if lines else ""
        if doctest and not bare:
            lines.append("```")
        doctest = bool(bare) and (doctest or bare.startswith(">>>"))
        if doctest:
            lines += ["```pycon", line] if not before or before == "```" else [line]
            continue
        if bare and not line.startswith(" "):
            section, returns, item = bool(SECTION.match(line)), line == "Returns:", False
        elif bare and not section and (item or before):
            # a list under a sentence, which a formula under an empty line is not
            line = ITEM.sub(r"\n- `\1`: ", line) if ITEM.match(line) else "    " + bare
            item = True
        elif section and (pair := PAIR.match(line)):
            # griffe takes one name at a time
            lines.append(f"{pair[1]}{pair[2]}: with `{pair[3]}`.")
            line = pair[1] + pair[3] + line[pair.end() :]
        elif returns:
            # griffe takes what stands before a colon as a type
            line = line.replace(": ", "&#58; ")
        lines.append(line if line.startswith("    ") and not (section or item) else prose(line))
    return "\n".join([*lines, "```"] if doctest else lines)


def prose(line: str) -> str:
    """Headings in bold, shapes as code, names as links where the site has them."""
    line = NOTE.sub(r"**\1\2:**", line) if NOTE.match(line) else line
    # what stands between backticks is every second piece
    pieces = re.split(r"(`[^`]*`)", line)
    pieces[::2] = [SHAPE.sub(r"`\g<0>`", piece) for piece in pieces[::2]]
    return NAME.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', "".join(pieces))
