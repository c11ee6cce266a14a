"""The page that `outcore report` writes: HTML and SVG made here, one style sheet, one script, no network."""
