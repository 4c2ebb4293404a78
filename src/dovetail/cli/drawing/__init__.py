"""Pictures of a workflow's graph: as text, for Mermaid, for Graphviz, and as SVG."""
