// Nothing of it is needed by device code.

#pragma once
