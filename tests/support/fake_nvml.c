/* A libnvidia-ml.so.1 of two GPUs, of which the second is faulty: what nvidia-ml-py really loads.
   Functions that are not here are "function not found", as with an older driver.
   FAKE_NVML_INIT=code makes nvmlInit fail, FAKE_NVML_HANG=1 makes one question hang. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct {
  char bus_id_legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32];
} pci_t;

static char gpus[2];
static int index_of(void *handle) { return (char *)handle == &gpus[1]; }

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  const char *code = getenv("FAKE_NVML_INIT");
  return code ? atoi(code) : 0;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "fake error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.95.05"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if (index > 1) return 2;
  *handle = &gpus[index];
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  if (strncmp(uuid, "GPU-fake-", 9)) return 6;
  *handle = &gpus[uuid[9] == '1'];
  return 0;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  (void)handle;
  snprintf(text, size, "NVIDIA Fake 80GB");
  return 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  snprintf(text, size, "GPU-fake-%d", index_of(handle));
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
  (void)handle;
  memory->total = 80ULL << 30;
  memory->free = 79ULL << 30;
  memory->used = 1ULL << 30;
  return 0;
}
int nvmlDeviceGetPciInfo_v3(void *handle, pci_t *pci) {
  memset(pci, 0, sizeof *pci);
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:0%d:00.0", index_of(handle) + 1);
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  (void)handle;
  *major = 9;
  *minor = 0;
  return 0;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, int kind, int *status) {
  (void)one;
  (void)other;
  *status = kind == 1 ? 1 : 0; /* reading is fine, writing is not supported by the chipset */
  return 0;
}
int nvmlDeviceGetNvLinkState(void *handle, unsigned link, int *active) {
  if (link >= 4) return 3;
  *active = !(index_of(handle) && link == 2);
  return 0;
}
int nvmlDeviceGetRemappedRows(void *handle, unsigned *corr, unsigned *unc, unsigned *pending,
                              unsigned *failure) {
  *corr = *unc = *failure = 0;
  *pending = index_of(handle);
  return 0;
}
/* Only where asked for: other drivers lack it. Writes behind the pointer, as the real one. */
typedef struct {
  unsigned version; unsigned char uuid[16]; int status; unsigned clique; unsigned char state;
  unsigned health;
} fabric_t;
int nvmlDeviceGetGpuFabricInfoV(void *handle, fabric_t *fabric) {
  (void)handle;
  if (!getenv("FAKE_NVML_FABRIC")) return 13;
  fabric->state = (unsigned char)atoi(getenv("FAKE_NVML_FABRIC"));
  return 0;
}
int nvmlDeviceGetPersistenceMode(void *handle, int *mode) {
  (void)handle;
  if (getenv("FAKE_NVML_HANG")) pause();
  *mode = 1;
  return 0;
}
