"""Colours, sizes and fonts of the page; fonts are the system's, nothing is fetched."""

from __future__ import annotations

import gradio as gr

SANS = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace")


def theme() -> gr.themes.Base:
    """A quiet, dense theme for light and dark."""
    base = gr.themes.Base(
        primary_hue="blue",
        neutral_hue="zinc",
        spacing_size="sm",
        text_size="sm",
        font=SANS,
        font_mono=MONO,
    )
    return base.set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color_subdued="*neutral_500",
        layout_gap="10px",
        block_border_color="*neutral_200",
        block_border_color_dark="*neutral_800",
        border_color_primary_dark="*neutral_800",
        block_background_fill_dark="*neutral_900",
        background_fill_primary_dark="*neutral_900",
        background_fill_secondary_dark="*neutral_800",
        block_padding="6px 10px",
        block_radius="8px",
        block_title_text_size="11px",
        block_title_text_color_dark="*neutral_400",
        input_background_fill="white",
        input_background_fill_dark="*neutral_900",
        input_border_width="1px",
        input_border_width_dark="1px",
        input_border_color_dark="*neutral_700",
        input_padding="6px 8px",
        input_radius="6px",
        checkbox_label_padding="5px 10px",
        checkbox_label_background_fill="transparent",
        checkbox_label_background_fill_dark="transparent",
        button_large_text_size="13px",
        button_large_padding="6px 14px",
        button_large_radius="6px",
        button_small_text_size="12px",
        button_small_radius="6px",
        button_large_text_weight="500",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_hover_dark="*primary_500",
        button_secondary_background_fill="white",
        button_secondary_background_fill_dark="*neutral_800",
        button_secondary_border_color_dark="*neutral_700",
        button_border_width="1px",
        button_border_width_dark="1px",
    )
