// The attribute of a kernel whose workgroups form clusters of MX_CLUSTER, a macro that stands
// before this is included. One alone gets none, as a cluster of one is a launch in clusters, too.
#pragma once

#if MX_CLUSTER > 1
#define MX_CLUSTER_DIMS __cluster_dims__(MX_CLUSTER, 1, 1)
#else
#define MX_CLUSTER_DIMS
#endif
