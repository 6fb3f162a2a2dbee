"""Names of all fields: tells them from names of types in where pydantic found a fault."""

from speq.server.fields import BODIES
from speq.server.message_fields import MESSAGE_BODIES
from speq.server.ollama_fields import OLLAMA_BODIES
from speq.server.response_fields import RESPONSE_BODIES

FIELD_NAMES = frozenset(
    field.alias or name
    for body in (*BODIES, *MESSAGE_BODIES, *RESPONSE_BODIES, *OLLAMA_BODIES)
    for name, field in body.model_fields.items()
)
