//! Macros that generate, from the rows in `sys`, tables of function pointers looked up by name, and
//! one Rust method for each C function, which returns the status as a [`Result`].

/// Declares how a table is loaded: from the installed CANN, or from given files.
macro_rules! found {
    ($table:ident, $libraries:ident) => {
        #[expect(unsafe_code, reason = "the callers guarantee the libraries")]
        impl $table {
            /// Returns the table of the installed CANN, which the first call loads.
            ///
            /// # Errors
            ///
            /// [`LoadError`](crate::LoadError), the same at every call.
            pub fn global() -> Result<&'static Self, $crate::LoadError> {
                static FOUND: std::sync::OnceLock<Result<$table, $crate::LoadError>> =
                    std::sync::OnceLock::new();
                let load = || {
                    let libraries = $crate::loader::Libraries::of_cann($libraries)?;
                    // SAFETY: these are CANN's libraries, in the folders that the user's
                    // environment sets for CANN; its headers have the prototypes of this table.
                    unsafe { Self::from_symbols(&|name| libraries.symbol(name)) }
                        .map(|table| Self { origin: Some(libraries.origin()), ..table })
                        .map_err(|error| libraries.explain(error))
                };
                FOUND.get_or_init(load).as_ref().map_err(Clone::clone)
            }

            /// Loads the table from those of `paths` that can be opened. A function that several
            /// have is taken from the first.
            ///
            /// # Errors
            ///
            /// [`LoadError`](crate::LoadError).
            ///
            /// # Safety
            ///
            /// The libraries must be CANN's or have its C interface: opening them runs their
            /// initializers, and their functions are called with the prototypes of this table.
            pub unsafe fn open(paths: &[std::path::PathBuf]) -> Result<Self, $crate::LoadError> {
                // SAFETY: the caller guarantees the libraries.
                let libraries = unsafe { $crate::loader::Libraries::open(paths) }?;
                // SAFETY: as above, so its symbols have the types of the table.
                unsafe { Self::from_symbols(&|name| libraries.symbol(name)) }
                    .map(|table| Self { origin: Some(libraries.origin()), ..table })
                    .map_err(|error| libraries.explain(error))
            }
        }
    };
}
pub(crate) use found;

/// The address that `find` returns for a name, as a function of the given type.
macro_rules! address_as {
    ($find:expr, $name:expr, $prototype:ty) => {
        $find($name).map(|address| {
            // SAFETY: not null; the caller guarantees the prototype. On CANN's platforms, function
            // and data pointers have the same representation.
            unsafe { std::mem::transmute::<*mut std::ffi::c_void, $prototype>(address.as_ptr()) }
        })
    };
}
pub(crate) use address_as;

/// Generates from a family's rows the struct of its functions, and a method for each.
macro_rules! bind {
    (
        $(#[$meta:meta])*
        $table:ident = $libraries:ident
        required { $(fn $f:ident($($a:ident: $t:ty),* $(,)?) -> $r:ty;)* }
        optional { $(fn $of:ident($($oa:ident: $ot:ty),* $(,)?) -> $or:ty;)* }
    ) => {
        $(#[$meta])*
        ///
        /// A value has every required function. Each method calls the C function of its name.
        #[derive(Clone, Copy, Debug)]
        #[expect(non_snake_case, reason = "the names are C's")]
        pub struct $table {
            $($f: unsafe extern "C" fn($($t),*) -> $r,)*
            $($of: Option<unsafe extern "C" fn($($ot),*) -> $or>,)*
            /// The libraries, for errors.
            origin: Option<&'static str>,
        }

        $crate::table::found!($table, $libraries);

        #[expect(unsafe_code, reason = "calls C by function pointers of declared types")]
        #[expect(non_snake_case, reason = "the names are C's")]
        impl $table {
            /// Every function of this table.
            pub const SYMBOLS: &[Symbol] = &[
                $(Symbol {
                    name: stringify!($f),
                    required: true,
                    since: "8.1",
                    result: <$r as CType>::c,
                    parameters: &[$(<$t as CType>::c),*],
                },)*
                $(Symbol {
                    name: stringify!($of),
                    required: false,
                    since: "8.1",
                    result: <$or as CType>::c,
                    parameters: &[$(<$ot as CType>::c),*],
                },)*
            ];

            /// Makes the table from the addresses that `find` returns.
            ///
            /// # Errors
            ///
            /// [`LoadError::MissingSymbol`](crate::LoadError::MissingSymbol).
            ///
            /// # Safety
            ///
            /// Each address must be of a function with the declared prototype, for the life of the
            /// process.
            pub unsafe fn from_symbols(
                find: &dyn Fn(&'static str) -> Option<std::ptr::NonNull<std::ffi::c_void>>,
            ) -> Result<Self, $crate::LoadError> {
                Ok(Self {
                    $($f: $crate::table::address_as!(
                        find, stringify!($f), unsafe extern "C" fn($($t),*) -> $r
                    ).ok_or_else(|| $crate::LoadError::missing(stringify!($f)))?,)*
                    $($of: $crate::table::address_as!(
                        find, stringify!($of), unsafe extern "C" fn($($ot),*) -> $or
                    ),)*
                    origin: None,
                })
            }

            $(
                #[doc = concat!("`", stringify!($f), "`.")]
                ///
                /// # Errors
                ///
                /// A status that is not success.
                ///
                /// # Safety
                ///
                /// The caller must follow CANN's documentation of this function.
                pub unsafe fn $f(
                    &self, $($a: $t),*
                ) -> $crate::Result<<$r as $crate::Returned>::Value> {
                    // SAFETY: the caller follows the function's rules; the type is the declared
                    // one.
                    let returned = unsafe { (self.$f)($($a),*) };
                    $crate::Returned::checked(returned, stringify!($f))
                }
            )*

            $(
                #[doc = concat!("`", stringify!($of), "`, if this CANN has it.")]
                ///
                /// # Errors
                ///
                /// A status that is not success; `Error::NoFunction` if this CANN lacks the
                /// function.
                ///
                /// # Safety
                ///
                /// The caller must follow CANN's documentation of this function.
                pub unsafe fn $of(
                    &self, $($oa: $ot),*
                ) -> $crate::Result<<$or as $crate::Returned>::Value> {
                    let function = self.$of.ok_or($crate::Error::NoFunction {
                        function: stringify!($of),
                        origin: self.origin,
                        since: "8.1",
                    })?;
                    // SAFETY: the caller follows the function's rules; the type is the declared
                    // one.
                    let returned = unsafe { function($($oa),*) };
                    $crate::Returned::checked(returned, stringify!($of))
                }
            )*
        }
    };
}
pub(crate) use bind;

/// The first version of CANN that has an operator, from the end of its row.
macro_rules! since {
    () => {
        "8.1"
    };
    ($version:literal) => {
        $version
    };
}
pub(crate) use since;

/// Generates from the operators' rows the struct of their functions, and for each a method that
/// returns a [`Plan`](crate::Plan).
macro_rules! bind_ops {
    (
        $(#[$meta:meta])*
        $table:ident = $libraries:ident {
            $(fn $run:ident, $plan:ident($($a:ident: $t:ty),* $(,)?) $(in $since:tt)?;)*
        }
    ) => {
        $(#[$meta])*
        ///
        /// Each method calls an operator's first function and returns a plan, which runs once.
        #[derive(Clone, Copy, Debug)]
        #[expect(non_snake_case, reason = "the names are C's")]
        pub struct $table {
            $($run: Option<Phases<
                unsafe extern "C" fn($($t,)* *mut u64, *mut *mut AclOpExecutor) -> AclnnStatus
            >>,)*
            /// The libraries, for errors.
            origin: Option<&'static str>,
        }

        $crate::table::found!($table, $libraries);

        #[expect(unsafe_code, reason = "calls C by function pointers of declared types")]
        #[expect(non_snake_case, reason = "the names are C's")]
        impl $table {
            /// Every function of this table.
            pub const SYMBOLS: &[Symbol] = &[
                $(
                    Symbol {
                        name: stringify!($plan),
                        required: false,
                        since: $crate::table::since!($($since)?),
                        result: AclnnStatus::c,
                        parameters: &[
                            $(<$t as CType>::c,)*
                            <*mut u64 as CType>::c,
                            <*mut *mut AclOpExecutor as CType>::c,
                        ],
                    },
                    Symbol {
                        name: stringify!($run),
                        required: false,
                        since: $crate::table::since!($($since)?),
                        result: AclnnStatus::c,
                        parameters: &[
                            <*mut c_void as CType>::c,
                            u64::c,
                            <*mut AclOpExecutor as CType>::c,
                            AclrtStream::c,
                        ],
                    },
                )*
            ];

            /// Makes the table from the addresses that `find` returns.
            ///
            /// # Errors
            ///
            /// None: no operator is required.
            ///
            /// # Safety
            ///
            /// Each address must be of a function with the declared prototype, for the life of the
            /// process.
            pub unsafe fn from_symbols(
                find: &dyn Fn(&'static str) -> Option<std::ptr::NonNull<std::ffi::c_void>>,
            ) -> Result<Self, $crate::LoadError> {
                Ok(Self {
                    $($run: {
                        let plan = $crate::table::address_as!(
                            find,
                            stringify!($plan),
                            unsafe extern "C" fn(
                                $($t,)* *mut u64, *mut *mut AclOpExecutor
                            ) -> AclnnStatus
                        );
                        let run = $crate::table::address_as!(find, stringify!($run), Run);
                        plan.zip(run).map(|(plan, run)| Phases { plan, run })
                    },)*
                    origin: None,
                })
            }

            /// Whether this CANN has an operator.
            #[must_use]
            pub fn has(&self, operator: &str) -> bool {
                match operator {
                    $(stringify!($run) => self.$run.is_some(),)*
                    _ => false,
                }
            }

            $(
                #[doc = concat!("`", stringify!($plan), "`, if this CANN has it.")]
                ///
                /// # Errors
                ///
                /// A status that is not success; `Error::NoFunction` if this CANN lacks the
                /// function.
                ///
                /// # Safety
                ///
                /// The caller must follow CANN's documentation of this function.
                pub unsafe fn $run(&self, $($a: $t),*) -> $crate::Result<$crate::Plan> {
                    let function = stringify!($plan);
                    let (origin, since) = (self.origin, $crate::table::since!($($since)?));
                    let missing = $crate::Error::NoFunction { function, origin, since };
                    let phases = self.$run.ok_or(missing)?;
                    let mut workspace_bytes = 0;
                    let mut executor = std::ptr::null_mut();
                    // SAFETY: the caller follows the function's rules; the two results are locals.
                    let returned = unsafe {
                        (phases.plan)($($a,)* &raw mut workspace_bytes, &raw mut executor)
                    };
                    $crate::Returned::checked(returned, function)?;
                    let (run, operator) = (phases.run, stringify!($run));
                    Ok($crate::Plan { operator, workspace_bytes, executor, run })
                }
            )*
        }
    };
}
pub(crate) use bind_ops;
