"""How many replicas a traffic needs: proposed from what one engine carries, then played through the simulator."""
