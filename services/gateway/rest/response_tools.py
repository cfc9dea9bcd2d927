"""Tools of the Responses API: functions, custom tools (whose input is a text) and namespaces of both, as the model and
as the client know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.services.gateway.generation import refused
from kvmesh.services.gateway.rest.chat import MAX_TOOLS, check_tool_name, check_tools, read_tool
from kvmesh.services.gateway.rest.response_items import CUSTOM_INPUT
from kvmesh.services.gateway.text.chat import AUTO, NONE, REQUIRED, Tool

Json = dict[str, Any]

# Coding agents name these of themselves, beside their own functions, and do without them. Where the model chooses what
# to call they are left out.
LEFT_OUT = (
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "image_generation",
    "local_shell", "tool_search",
)  # fmt: skip
TOOL_TYPES = ("function", "custom", "namespace")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_FUNCTION_IDLE = ("type", "defer_loading", "allowed_callers", "output_schema", "async")
_CUSTOM_FIELDS = ("name", "description", "format")


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the client knows it."""

    name: str
    namespace: str = ""
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolSet:
    """`tools` are the model's, in order; `known` tells by their names what the client calls them; `told` is what the
    response says of them."""

    tools: tuple[Tool, ...] = ()
    known: Mapping[str, ClientTool] = field(default_factory=dict)
    told: Sequence[Json] = ()
    left_out: Sequence[str] = ()

    def name_of(self, namespace: str, name: str) -> str:
        """Returns what the model calls a tool. One that is no longer there keeps its name."""
        whole = f"{namespace}.{name}" if namespace else name
        return whole if whole in self.known else name

    def client_tool(self, name: str) -> ClientTool:
        """Returns the tool that the model calls `name`."""
        return self.known.get(name) or ClientTool(name)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """AUTO, NONE or REQUIRED; the tool that must be called, or those that alone may be; and what the response says."""

    choice: str = AUTO
    named: str = ""
    allowed: frozenset[str] | None = None
    told: Any = AUTO


def read_tools(value: Any) -> ToolSet:
    """Returns the tools of a body. Raises InvalidRequest naming the first that is wrong or not served."""
    if value is None:
        return ToolSet()
    if not isinstance(value, list):
        raise refused("tools", value, "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise refused("tools", value, f"at most {MAX_TOOLS} tools are allowed")
    found: list[tuple[Tool, ClientTool]] = []
    told: list[Json] = []
    left_out: list[str] = []
    for index, one in enumerate(value):
        where = f"tools.{index}"
        kind = one.get("type") if isinstance(one, dict) else None
        if not isinstance(kind, str):
            raise refused(where, one, 'must be an object such as {"type": "function", "name": ...}')
        if kind in LEFT_OUT:
            left_out.append(kind)
        elif kind == "namespace":
            inner, shown = _read_namespace(where, one)
            found += inner
            told.append(shown)
        else:
            tool, custom, shown = _read_tool(where, one)
            found.append((tool, ClientTool(tool.name, custom=custom)))
            told.append(shown)
    if len(found) > MAX_TOOLS:
        raise refused("tools", value, f"{len(found)} functions; at most {MAX_TOOLS} are allowed")
    return _distinct(found, told, left_out)


def _distinct(found: Sequence[tuple[Tool, ClientTool]], told: Sequence[Json], left_out: Sequence[str]) -> ToolSet:
    """Tools of a namespace keep their names unless two tools share one."""
    names = [tool.name for tool, _ in found]
    tools, known = [], {}
    for tool, client in found:
        if client.namespace and names.count(tool.name) > 1:
            tool = Tool(f"{client.namespace}.{tool.name}", tool.description, tool.parameters, tool.strict)
        tools.append(tool)
        known[tool.name] = client
    check_tools("tools", tools, "")
    return ToolSet(tuple(tools), known, told, left_out)


def _read_tool(where: str, one: Json) -> tuple[Tool, bool, Json]:
    """The model's tool, whether it is a custom one, and what the response says of it."""
    kind = one["type"]
    if kind == "function":
        for name, value in one.items():
            if name not in _FUNCTION_FIELDS and name not in _FUNCTION_IDLE and value is not None:
                raise refused(f"{where}.{name}", value, "unknown field")
        tool = read_tool(where, one)
        shown = {
            "type": "function",
            "name": tool.name,
            "description": one.get("description"),
            "parameters": one.get("parameters"),
            "strict": tool.strict,
        }
        return tool, False, shown
    if kind == "custom":
        for name, value in one.items():
            if name not in _CUSTOM_FIELDS and name not in _FUNCTION_IDLE and value is not None:
                raise refused(f"{where}.{name}", value, "unknown field")
        return _read_custom(where, one), True, {name: value for name, value in one.items() if value is not None}
    raise refused(f"{where}.type", kind, f"not supported by kvmesh; {', '.join(TOOL_TYPES)} are")


def _read_custom(where: str, one: Json) -> Tool:
    """A custom tool is a function of one text; the format of that text stands in its description."""
    tool = read_tool(where, {"name": one.get("name"), "description": one.get("description")})
    wanted = one.get("format") or {"type": "text"}
    if not isinstance(wanted, dict) or wanted.get("type") not in ("text", "grammar"):
        raise refused(f"{where}.format", wanted, "its type must be text or grammar")
    description = tool.description
    if wanted["type"] == "grammar":
        grammar, syntax = wanted.get("definition"), wanted.get("syntax")
        if not isinstance(grammar, str) or not isinstance(syntax, str):
            raise refused(f"{where}.format", wanted, "a grammar needs syntax and definition")
        description = f"{description}\n\nThe input must follow this grammar ({syntax}):\n{grammar}".strip()
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return Tool(tool.name, description, parameters)


def _read_namespace(where: str, one: Json) -> tuple[list[tuple[Tool, ClientTool]], Json]:
    check_tool_name(f"{where}.name", one.get("name"))
    inside = one.get("tools")
    if not isinstance(inside, list) or len(inside) > MAX_TOOLS:
        raise refused(f"{where}.tools", inside, f"must be a list of at most {MAX_TOOLS} tools")
    found, told = [], []
    for index, tool in enumerate(inside):
        at = f"{where}.tools.{index}"
        if not isinstance(tool, dict) or tool.get("type") not in ("function", "custom"):
            raise refused(at, tool, "must be a function or a custom tool")
        made, custom, shown = _read_tool(at, tool)
        found.append((made, ClientTool(made.name, one["name"], custom)))
        told.append(shown)
    description = one.get("description")
    if description is not None and not isinstance(description, str):
        raise refused(f"{where}.description", description, "must be a string")
    return found, {"type": "namespace", "name": one["name"], "description": description or "", "tools": told}


def read_choice(value: Any) -> ToolChoice:
    """Returns the `tool_choice` of a body. Raises InvalidRequest."""
    if value is None:
        return ToolChoice()
    if value in (AUTO, NONE, REQUIRED):
        return ToolChoice(value, told=value)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("function", "custom"):
        check_tool_name("tool_choice.name", value.get("name"))
        return ToolChoice(REQUIRED, value["name"], told={"type": kind, "name": value["name"]})
    if kind == "allowed_tools":
        return _read_allowed(value)
    if kind is not None:
        raise refused("tool_choice.type", kind, "not supported by kvmesh; function, custom and allowed_tools are")
    raise refused("tool_choice", value, f"must be {AUTO}, {NONE}, {REQUIRED} or an object that names a tool")


def _read_allowed(value: Json) -> ToolChoice:
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in (AUTO, REQUIRED):
        raise refused("tool_choice.mode", mode, f"must be {AUTO} or {REQUIRED}")
    if not isinstance(tools, list) or not tools or len(tools) > MAX_TOOLS:
        raise refused("tool_choice.tools", tools, f"must be a list of 1 to {MAX_TOOLS} tools")
    names = set()
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") not in ("function", "custom"):
            raise refused(f"tool_choice.tools.{index}", tool, "must be a function or a custom tool")
        check_tool_name(f"tool_choice.tools.{index}.name", tool.get("name"))
        names.add(tool["name"])
    return ToolChoice(mode, allowed=frozenset(names), told={"type": "allowed_tools", "mode": mode, "tools": tools})


def tools_for(tools: ToolSet, choice: ToolChoice) -> tuple[Tool, ...]:
    """Returns the tools that the model is given. Raises InvalidRequest for a choice that cannot be met."""
    if tools.left_out and choice.choice == REQUIRED:
        raise refused("tools", tools.left_out[0], "not supported by kvmesh; left out only where tool_choice is auto")
    check_tools("tools", tools.tools, choice.named)
    if choice.choice == REQUIRED and not tools.tools:
        raise refused("tool_choice", choice.choice, "there are no tools")
    if choice.allowed is None:
        return tools.tools
    missing = sorted(choice.allowed - {tool.name for tool in tools.tools})
    if missing:
        raise refused("tool_choice.tools", missing[0], "no tool has this name")
    return tuple(tool for tool in tools.tools if tool.name in choice.allowed)


# ── for the documentation ─────────────────────────────────────────────────────────────────────────

_NAME = {"type": "string", "pattern": r"^[A-Za-z0-9_.:/-]{1,128}$"}
_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


def _typed(kind: str, more: Json) -> Json:
    properties = {"type": {"const": kind}, "name": _NAME, **more}
    return {"type": "object", "properties": properties, "required": ["type", "name"], "additionalProperties": False}


_FUNCTION = _typed(
    "function",
    {
        "description": _TEXT_OR_NULL,
        "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
)
_CUSTOM = _typed("custom", {"description": _TEXT_OR_NULL})
TOOLS_SCHEMA: Json = {
    "anyOf": [
        {"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM]}, "maxItems": MAX_TOOLS},
        {"type": "null"},
    ]
}
CHOICE_SCHEMA: Json = {
    "anyOf": [{"enum": [AUTO, NONE, REQUIRED]}, _typed("function", {}), _typed("custom", {}), {"type": "null"}]
}
