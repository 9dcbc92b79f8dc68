"""The fields of a KubeletConfiguration, as data.

Of Kubernetes staging/src/k8s.io/kubelet/config/v1beta1/types.go at commit 001332b0422071acf4860769f18e34b5e9b7c1bc
(1.36 or a little later: memoryReservationPolicy came with 1.36). Older versions have fewer. A field that is missing
here costs a warning, no error.
"""

from __future__ import annotations

API_VERSION = "kubelet.config.k8s.io/v1beta1"
KIND = "KubeletConfiguration"

FIELDS = frozenset((
    "apiVersion", "kind",
    "address", "allowedUnsafeSysctls", "authentication", "authorization", "cgroupDriver", "cgroupRoot", "cgroupsPerQOS",
    "clusterDNS", "clusterDomain", "configMapAndSecretChangeDetectionStrategy", "containerLogMaxFiles",
    "containerLogMaxSize", "containerLogMaxWorkers", "containerLogMonitorInterval", "containerRuntimeEndpoint",
    "contentType", "cpuCFSQuota", "cpuCFSQuotaPeriod", "cpuManagerPolicy", "cpuManagerPolicyOptions",
    "cpuManagerReconcilePeriod", "crashLoopBackOff", "draManagerReconcilePeriod", "enableContentionProfiling",
    "enableControllerAttachDetach", "enableDebugFlagsHandler", "enableDebuggingHandlers", "enableProfilingHandler",
    "enableServer", "enableSystemLogHandler", "enableSystemLogQuery", "enforceNodeAllocatable", "eventBurst",
    "eventRecordQPS", "evictionHard", "evictionMaxPodGracePeriod", "evictionMinimumReclaim",
    "evictionPressureTransitionPeriod", "evictionSoft", "evictionSoftGracePeriod", "failCgroupV1", "failSwapOn",
    "featureGates", "fileCheckFrequency", "hairpinMode", "healthzBindAddress", "healthzPort", "httpCheckFrequency",
    "imageGCHighThresholdPercent", "imageGCLowThresholdPercent", "imageMaximumGCAge", "imageMinimumGCAge",
    "imagePullCredentialsVerificationPolicy", "imageServiceEndpoint", "iptablesDropBit", "iptablesMasqueradeBit",
    "kernelMemcgNotification", "kubeAPIBurst", "kubeAPIQPS", "kubeReserved", "kubeReservedCgroup", "kubeletCgroups",
    "localStorageCapacityIsolation", "logging", "makeIPTablesUtilChains", "maxOpenFiles", "maxParallelImagePulls",
    "maxPods", "memoryManagerPolicy", "memoryReservationPolicy", "memorySwap", "memoryThrottlingFactor",
    "mergeDefaultEvictionSettings", "nodeLeaseDurationSeconds", "nodeStatusMaxImages", "nodeStatusReportFrequency",
    "nodeStatusUpdateFrequency", "oomScoreAdj", "podCIDR", "podLogsDir", "podPidsLimit", "podsPerCore", "port",
    "preloadedImagesVerificationAllowlist", "protectKernelDefaults", "providerID", "qosReserved", "readOnlyPort",
    "registerNode", "registerWithTaints", "registryBurst", "registryPullQPS", "reservedMemory", "reservedSystemCPUs",
    "resolvConf", "rotateCertificates", "runOnce", "runtimeRequestTimeout", "seccompDefault", "serializeImagePulls",
    "serverTLSBootstrap", "showHiddenMetricsForVersion", "shutdownGracePeriod", "shutdownGracePeriodByPodPriority",
    "shutdownGracePeriodCriticalPods", "singleProcessOOMKill", "staticPodPath", "staticPodURL", "staticPodURLHeader",
    "streamingConnectionIdleTimeout", "syncFrequency", "systemCgroups", "systemReserved", "systemReservedCgroup",
    "tlsCertFile", "tlsCipherSuites", "tlsCurvePreferences", "tlsMinVersion", "tlsPrivateKeyFile",
    "topologyManagerPolicy", "topologyManagerPolicyOptions", "topologyManagerScope", "tracing", "userNamespaces",
    "volumePluginDir", "volumeStatsAggPeriod",
))  # fmt: skip
"""Top-level fields; the kubelet tells capital letters apart."""

RESERVATION_FIELDS = frozenset(("numaNode", "limits"))
"""Fields of an entry of reservedMemory."""
