"""Conversions of tensors that transformers lists for a whole model, and not for its text alone."""

from transformers import conversion_mapping


def list_for_text(whole: str, text: str) -> None:
    """Let transformers' loader convert what it does in a family's whole models in models of text
    too, where it knows the former and has nothing for the latter.

    whole, text  their types; patterns of names from their beginning are those of other parts
    """
    known = conversion_mapping.get_checkpoint_conversion_mapping
    listed = known(whole)
    if listed is None or known(text) is not None:
        return
    own = [each for each in listed if not each.source_patterns[0].startswith("^")]
    head = conversion_mapping.WeightRenaming(r"^language_model\.lm_head", "lm_head")
    conversion_mapping.register_checkpoint_conversion_mapping(text, [head, *own])
