/* Launches compiled kernels by the CUDA driver's function, without Python between them.

   `prepare` keeps the launches of a plan. `run` repeats them with the tensors of a call. A parameter
   of a kernel is a number, an address in the memory of a tensor, or a TMA descriptor of such an
   address; only the last two change from call to call. See driver.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <stdint.h>
#include <string.h>

#define MOST_MAPS 64 /* encoded TMA descriptors that are kept for each parameter */

typedef CUresult (*LaunchFunction)(const CUlaunchConfig *, CUfunction, void **, void **);

typedef struct {
  uint64_t number;    /* the bits of a number, or the offset of an address in bytes */
  Py_ssize_t memory;  /* the index of a tensor, or -1 for a number */
  PyObject *encode;   /* makes a TMA descriptor of an address; NULL if the parameter is none */
  PyObject *known;    /* dict: what it made, by address */
} Parameter;

typedef struct {
  CUlaunchConfig config;
  CUlaunchAttribute dependent;
  CUfunction function;
  Parameter *parameters;
  Py_ssize_t count;
} Launch;

typedef struct {
  LaunchFunction function;
  PyObject *failed; /* called with the index of a launch and the driver's error */
  Launch *launches;
  Py_ssize_t count;
  Py_ssize_t parameters; /* of all launches */
  Py_ssize_t maps;       /* of all launches */
  Py_ssize_t memories;   /* tensors that `run` takes */
} Plan;

static const char *NAME = "sagesim_kernels.launches";

static void release(Plan *plan) {
  for (Py_ssize_t i = 0; i < plan->count; i++) {
    Launch *launch = &plan->launches[i];
    for (Py_ssize_t j = 0; j < launch->count; j++) {
      Py_XDECREF(launch->parameters[j].encode);
      Py_XDECREF(launch->parameters[j].known);
    }
    PyMem_Free(launch->parameters);
  }
  PyMem_Free(plan->launches);
  Py_XDECREF(plan->failed);
  PyMem_Free(plan);
}

static void destroy(PyObject *capsule) { release(PyCapsule_GetPointer(capsule, NAME)); }

/* A parameter is given as an integer, (memory, offset) or (memory, offset, encode). */
static int read_parameter(PyObject *given, Parameter *parameter) {
  parameter->memory = -1;
  if (PyLong_Check(given)) {
    parameter->number = PyLong_AsUnsignedLongLong(given);
    return PyErr_Occurred() ? -1 : 0;
  }
  unsigned long long offset;
  if (!PyArg_ParseTuple(given, "nK|O", &parameter->memory, &offset, &parameter->encode)) return -1;
  parameter->number = offset;
  if (parameter->encode == NULL) return 0;
  Py_INCREF(parameter->encode);
  parameter->known = PyDict_New();
  return parameter->known == NULL ? -1 : 0;
}

static int read_launch(PyObject *given, Launch *launch, Plan *plan) {
  unsigned long long function;
  PyObject *parameters;
  CUlaunchConfig *config = &launch->config;
  int is_dependent;
  if (!PyArg_ParseTuple(given, "KIIIpO!", &function, &config->gridDimX, &config->blockDimX,
                        &config->sharedMemBytes, &is_dependent, &PyTuple_Type, &parameters))
    return -1;
  launch->function = (CUfunction)(uintptr_t)function;
  config->gridDimY = config->gridDimZ = config->blockDimY = config->blockDimZ = 1;
  if (is_dependent) {
    launch->dependent.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    launch->dependent.value.programmaticStreamSerializationAllowed = 1;
    config->attrs = &launch->dependent;
    config->numAttrs = 1;
  }
  Py_ssize_t count = PyTuple_GET_SIZE(parameters);
  launch->parameters = PyMem_Calloc(count, sizeof(Parameter));
  if (launch->parameters == NULL) return PyErr_NoMemory(), -1;
  launch->count = count;
  plan->parameters += count;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (read_parameter(PyTuple_GET_ITEM(parameters, i), &launch->parameters[i]) < 0) return -1;
    plan->maps += launch->parameters[i].encode != NULL;
    if (plan->memories <= launch->parameters[i].memory)
      plan->memories = launch->parameters[i].memory + 1;
  }
  return 0;
}

/* prepare(cuLaunchKernelEx, launches, failed): what `run` takes. A launch is a tuple (function,
   programs, threads, bytes of shared memory, whether it is dependent, parameters). */
static PyObject *prepare(PyObject *self, PyObject *args) {
  unsigned long long function;
  PyObject *launches, *failed;
  if (!PyArg_ParseTuple(args, "KO!O", &function, &PyTuple_Type, &launches, &failed)) return NULL;
  Plan *plan = PyMem_Calloc(1, sizeof(Plan));
  if (plan == NULL) return PyErr_NoMemory();
  plan->function = (LaunchFunction)(uintptr_t)function;
  plan->failed = Py_NewRef(failed);
  Py_ssize_t count = PyTuple_GET_SIZE(launches);
  plan->launches = PyMem_Calloc(count, sizeof(Launch));
  if (plan->launches == NULL) {
    release(plan);
    return PyErr_NoMemory();
  }
  plan->count = count;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (read_launch(PyTuple_GET_ITEM(launches, i), &plan->launches[i], plan) < 0) {
      release(plan);
      return NULL;
    }
  }
  PyObject *capsule = PyCapsule_New(plan, NAME, destroy);
  if (capsule == NULL) release(plan);
  return capsule;
}

/* Write the TMA descriptor of an address. It lies at the end of the object that Triton makes. */
static int write_map(Parameter *parameter, uint64_t address, CUtensorMap *map) {
  PyObject *key = PyLong_FromUnsignedLongLong(address);
  if (key == NULL) return -1;
  PyObject *found = Py_XNewRef(PyDict_GetItemWithError(parameter->known, key));
  if (found == NULL && !PyErr_Occurred()) {
    found = PyObject_CallOneArg(parameter->encode, key);
    if (found != NULL) {
      if (PyDict_GET_SIZE(parameter->known) >= MOST_MAPS) PyDict_Clear(parameter->known);
      if (PyDict_SetItem(parameter->known, key, found) < 0) Py_CLEAR(found);
    }
  }
  Py_DECREF(key);
  if (found == NULL) return -1;
  memcpy(map, (char *)found + Py_TYPE(found)->tp_basicsize - sizeof(CUtensorMap),
         sizeof(CUtensorMap));
  Py_DECREF(found);
  return 0;
}

static int read_addresses(PyObject *const *tensors, Py_ssize_t count, uint64_t *addresses) {
  static PyObject *name = NULL;
  if (name == NULL && (name = PyUnicode_InternFromString("data_ptr")) == NULL) return -1;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *address = PyObject_CallMethodNoArgs(tensors[i], name);
    if (address == NULL) return -1;
    addresses[i] = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    if (PyErr_Occurred()) return -1;
  }
  return 0;
}

/* Memory of one call, so that several threads may run the same plan. */
typedef struct {
  CUtensorMap *maps;
  uint64_t *numbers;
  void **pointers; /* to the parameters of all launches, one launch after the other */
} Values;

static int write_values(const Plan *plan, const uint64_t *addresses, Values values) {
  CUtensorMap *map = values.maps;
  Py_ssize_t n = 0;
  for (Py_ssize_t i = 0; i < plan->count; i++) {
    const Launch *launch = &plan->launches[i];
    for (Py_ssize_t j = 0; j < launch->count; j++, n++) {
      Parameter *parameter = &launch->parameters[j];
      uint64_t number = parameter->number;
      if (parameter->memory >= 0) number += addresses[parameter->memory];
      if (parameter->encode == NULL) {
        values.numbers[n] = number;
        values.pointers[n] = &values.numbers[n];
      } else {
        if (write_map(parameter, number, map) < 0) return -1;
        values.pointers[n] = map++;
      }
    }
  }
  return 0;
}

/* Launch from `first` on. Return the first launch that failed, or the number of launches. */
static Py_ssize_t launch_all(const Plan *plan, Py_ssize_t first, CUstream stream, void **pointers,
                             CUresult *error) {
  Py_ssize_t i;
  Py_BEGIN_ALLOW_THREADS; /* the driver waits if too many launches are waiting */
  for (i = 0; i < first; i++) pointers += plan->launches[i].count;
  for (; i < plan->count; i++) {
    const Launch *launch = &plan->launches[i];
    CUlaunchConfig config = launch->config;
    config.hStream = stream;
    *error = plan->function(&config, launch->function, pointers, NULL);
    if (*error != CUDA_SUCCESS) break;
    pointers += launch->count;
  }
  Py_END_ALLOW_THREADS;
  return i;
}

/* run(plan, stream, *tensors): launch all. If a launch fails, `failed` raises, or returns so that it
   is tried again. */
static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  const Py_ssize_t others = 2;
  const Plan *plan = count < others ? NULL : PyCapsule_GetPointer(args[0], NAME);
  if (PyErr_Occurred()) return NULL;
  if (plan == NULL || count - others < plan->memories)
    return PyErr_Format(PyExc_TypeError, "run takes a plan, a stream, and all tensors of the plan");
  uint64_t stream = PyLong_AsUnsignedLongLong(args[1]);
  if (PyErr_Occurred()) return NULL;
  Py_ssize_t tensors = count - others, n = plan->parameters;
  size_t bytes = plan->maps * sizeof(CUtensorMap) + n * (sizeof(uint64_t) + sizeof(void *)) +
                 tensors * sizeof(uint64_t);
  char *memory = PyMem_Malloc(bytes + _Alignof(CUtensorMap));
  if (memory == NULL) return PyErr_NoMemory();
  uintptr_t start = (uintptr_t)memory + _Alignof(CUtensorMap) - 1;
  start -= start % _Alignof(CUtensorMap);
  Values values;
  values.maps = (CUtensorMap *)start;
  values.numbers = (uint64_t *)(values.maps + plan->maps);
  values.pointers = (void **)(values.numbers + n);
  uint64_t *addresses = (uint64_t *)(values.pointers + n);
  int is_written = read_addresses(args + others, tensors, addresses) == 0 &&
                   write_values(plan, addresses, values) == 0;
  Py_ssize_t done = 0;
  while (is_written && done < plan->count) {
    CUresult error = CUDA_SUCCESS;
    done = launch_all(plan, done, (CUstream)(uintptr_t)stream, values.pointers, &error);
    if (error == CUDA_SUCCESS) break;
    PyObject *result = PyObject_CallFunction(plan->failed, "ni", done, (int)error);
    is_written = result != NULL;
    Py_XDECREF(result);
  }
  PyMem_Free(memory);
  if (!is_written) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"prepare", prepare, METH_VARARGS, NULL},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "launches", NULL, -1, METHODS};

PyMODINIT_FUNC PyInit_launches(void) { return PyModule_Create(&MODULE); }
