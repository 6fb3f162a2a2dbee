"""Chat templates of models that call tools and that think, in short, and a tool."""

# As Qwen2.5's.
TOOLS_TEMPLATE = """
{%- if tools %}{{ "Tools:" }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- "Answer with <tool_call>{...}</tool_call>" }}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}
{%- endfor %}{% endfor %}
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
THINKING_TEMPLATE = """
{%- for message in messages %}{{ message.role }}: {{ message.reasoning_content }}
{{- message.content.split("</think>")[-1] }}{% endfor %}
{{- "assistant: " }}{% if enable_thinking is defined and enable_thinking %}{{ "<think>\n" }}
{%- elif reasoning_effort is defined %}{{ "effort " + reasoning_effort }}{% endif %}
"""
