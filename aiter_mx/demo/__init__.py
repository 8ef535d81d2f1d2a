"""What ``aiter-mx demo`` runs: a real model, and the decode shapes of a large one."""
