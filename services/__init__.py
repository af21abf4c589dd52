"""The services: gateway, vision encoder and text engine. They never import each other."""
